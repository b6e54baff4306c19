"""Parts of a sequence put together over the ranks of a group, with the gradient that goes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


def gather_sequence(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """The parts of all ranks of `group` along dimension 0, in the order of the ranks. Collective over the group.

    For a result from which every rank computes the same loss: the gradient of a rank's part is its own slice of the
    gradient that arrives here, not a sum over ranks.

    Args:
        part: (seq / ranks, ...), of the same shape on every rank.
        group: None, or one rank alone, gives `part` back.
    """
    if group is None or distributed.get_world_size(group) == 1:
        return part
    gathered: Tensor = _GatherSequence.apply(part, group)  # type: ignore[no-untyped-call]
    return gathered


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.length, ctx.rank = part.shape[0], distributed.get_rank(group)
        whole = part.new_empty(part.shape[0] * distributed.get_world_size(group), *part.shape[1:])
        distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        start = ctx.rank * ctx.length
        return gradient[start : start + ctx.length], None
