"""Counts the exact zeros in gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed.shards import Split, local_part, split_of


def count_zeros(params: Iterable[Tensor], device: torch.device) -> Tensor:
    """Count the exact zeros in all gradients, each logical parameter once: a 0-d int64 tensor on `device`, unread.

    Collective for gradients that are DTensors: one reduction per kind of sharding and mesh dimension. A parameter
    marked as `shared` is counted by the rank that shares it; NaN does not count as zero.

    Args:
        params: the parameters whose gradients are counted.
    """
    counts: dict[Split, list[Tensor]] = {}
    for param in params:
        grad = param.grad
        if grad is not None and not getattr(param, "shared", False):
            part = local_part(grad)
            values = part.coalesce().values() if part.is_sparse else part
            zeros = (part.numel() - torch.count_nonzero(values)).to(device)
            counts.setdefault(split_of(grad), []).append(zeros)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for split, found in counts.items():
        count = torch.stack(found).sum()
        for mesh, dim in split:
            dist.all_reduce(count, op=dist.ReduceOp.SUM, group=mesh.get_group(dim))
        total = total + count
    return total
