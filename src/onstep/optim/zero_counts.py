"""Counts the exact zeros in gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from onstep.distributed.shard_sums import Kinds
from onstep.distributed.shards import local_part


def count_zeros(params: Iterable[Tensor], device: torch.device, kinds: Kinds | None = None) -> Tensor:
    """Count the exact zeros in all gradients, each logical parameter once: a 0-d int64 tensor on `device`, unread.

    Collective for parameters that are DTensors, whether or not this rank has a gradient. A parameter marked as `shared`
    is counted by the rank that shares it; NaN does not count as zero.

    Args:
        params: the parameters whose gradients are counted.
        kinds: the same parameters by how they are sharded, if that is known.
    """
    kinds = kinds or Kinds(params)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    counts = [_zeros_of(members, zero) for members in kinds.members]
    return kinds.sums(torch.stack(counts)).sum() if counts else zero


def _zeros_of(params: list[Tensor], zero: Tensor) -> Tensor:
    """The zeros in this rank's parts of the gradients, 0-d like `zero`."""
    counts = []
    for param in params:
        if param.grad is not None and not getattr(param, "shared", False):
            part = local_part(param.grad, like=param)
            values = part.coalesce().values() if part.is_sparse else part
            counts.append((part.numel() - torch.count_nonzero(values)).to(zero.device))
    return torch.stack(counts).sum() if counts else zero
