"""What CUDA's allocator holds, under the names that Megatron Bridge reports it by."""

from __future__ import annotations

from collections.abc import Mapping

import torch

MEMORY_KEYS: dict[str, str] = {
    "allocated_bytes.all.current": "mem-allocated-bytes",
    "active_bytes.all.current": "mem-active-bytes",
    "inactive_split_bytes.all.current": "mem-inactive-bytes",
    "reserved_bytes.all.current": "mem-reserved-bytes",
    "allocated_bytes.all.peak": "mem-max-allocated-bytes",
    "active_bytes.all.peak": "mem-max-active-bytes",
    "inactive_split_bytes.all.peak": "mem-max-inactive-bytes",
    "reserved_bytes.all.peak": "mem-max-reserved-bytes",
    "num_alloc_retries": "mem-alloc-retires",
    "allocation.all.current": "mem-allocated-count",
}
"""Statistics of `torch.cuda.memory_stats()` and the names they are reported under, `bytes` there as `gigabytes`."""

_GIGABYTE = 1e9
_DIGITS = 5


def report_memory(memory_keys: Mapping[str, str] | None = None) -> dict[str, int | float]:
    """What this process's GPU memory is used for; `{}` where CUDA is not in use.

    A statistic of bytes is given in gigabytes (1e9), rounded to 5 significant digits, with `bytes` in its name replaced
    by `gigabytes`; a count stays a whole number. What the allocator does not know is left out.

    Args:
        memory_keys: names of statistics of `torch.cuda.memory_stats()` with the names to report them under, in the
            order of the report; None or `{}` is `MEMORY_KEYS`.
    """
    statistics = torch.cuda.memory_stats()
    report: dict[str, int | float] = {}
    for key, name in (memory_keys or MEMORY_KEYS).items():
        if key not in statistics:
            continue
        value = statistics[key]
        if "bytes" in key:
            report[name.replace("bytes", "gigabytes")] = _rounded(value / _GIGABYTE)
        else:
            report[name] = value
    return report


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
