"""How many elements of the gradients are exactly zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed.shards import Split, local_part, split_of


def count_zeros(params: Iterable[Tensor], device: torch.device) -> Tensor:
    """The exact zeros among all gradients, each logical parameter once: a 0-d int64 tensor on `device`, unread.

    Collective where gradients are DTensors: one reduction for each way of splitting and mesh dimension. A parameter
    marked as `shared` is counted by the rank that shares it; NaN is no zero.
    """
    counts: dict[Split, list[Tensor]] = {}
    for param in params:
        grad = param.grad
        if grad is not None and not getattr(param, "shared", False):
            counts.setdefault(split_of(grad), []).append(_zeros_of(local_part(grad), device))
    total = torch.zeros((), dtype=torch.int64, device=device)
    for split, found in counts.items():
        part = torch.stack(found).sum()
        for mesh, dim in split:
            dist.all_reduce(part, op=dist.ReduceOp.SUM, group=mesh.get_group(dim))
        total = total + part
    return total


def _zeros_of(grad: Tensor, device: torch.device) -> Tensor:
    values = grad.coalesce().values() if grad.is_sparse else grad
    return (grad.numel() - torch.count_nonzero(values)).to(device)
