"""Reports of several ranks made one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def reduce_max_memory_across_pp_group(
    memory_report: Mapping[str, int | float], pp_group: Any
) -> Mapping[str, int | float]:
    """The largest value of each entry over the pipeline stages: the first stage holds the most activations.

    One collective over `pp_group`, whose ranks must have the same entries. Whole numbers stay whole. The report itself
    comes back where it is empty, or there are no other stages.
    """
    if not memory_report or not (dist.is_available() and dist.is_initialized()) or _size(pp_group) <= 1:
        return memory_report
    values = torch.tensor(list(memory_report.values()), dtype=torch.float64, device=_device_of(pp_group))
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=pp_group)
    return {
        name: int(largest) if isinstance(value, int) and not isinstance(value, bool) else largest
        for (name, value), largest in zip(memory_report.items(), values.tolist(), strict=True)
    }


def _size(group: Any) -> int:
    size = getattr(group, "size", None)
    return int(size()) if callable(size) else 1


def _device_of(group: Any) -> torch.device:
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
