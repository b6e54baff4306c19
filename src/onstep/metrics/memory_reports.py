"""Reports statistics of CUDA's allocator under Megatron Bridge's names, and records its memory history."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from onstep.config import ProfilingConfig
from onstep.distributed import shards
from onstep.metrics.memory_peaks import MemoryPeaks

logger = logging.getLogger(__name__)

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
"""Statistics of `torch.cuda.memory_stats()` and the names to report them under, with `gigabytes` for `bytes`."""

_GIGABYTE = 1e9
_DIGITS = 5


def report_memory(
    memory_keys: Mapping[str, str] | None = None, *, peaks: MemoryPeaks | None = None
) -> dict[str, int | float]:
    """GPU memory statistics of this process; `{}` if CUDA is not in use.

    Byte statistics are given in gigabytes (1e9), rounded to 5 significant digits, with `bytes` in their names replaced
    by `gigabytes`; counts remain integers. Statistics that the allocator does not provide are omitted.

    Args:
        memory_keys: names of statistics of `torch.cuda.memory_stats()` with the names to report them under, in the
            order of the report; None or `{}` means `MEMORY_KEYS`.
        peaks: those of a run that resets torch's counter; its maxima are reported.
    """
    statistics = torch.cuda.memory_stats()
    if peaks is not None:
        statistics = peaks.over_run(statistics)
    report: dict[str, int | float] = {}
    for key, name in (memory_keys or MEMORY_KEYS).items():
        if key not in statistics:
            continue
        value = statistics[key]
        if "bytes" in key:
            report[name.replace("bytes", "gigabytes")] = float(f"{value / _GIGABYTE:.{_DIGITS}g}")
        else:
            report[name] = value
    return report


MAX_EVENTS = 100_000
"""Number of allocations and frees to record; with full stacks, twice as many need about 1 GB of host memory."""


def start_memory_history_recording(profiling: ProfilingConfig | None) -> None:
    """Make CUDA's allocator record the origin of allocations, and write a snapshot when it runs out of memory.

    Call it before the model is built. Does nothing if `profiling` is None, `record_memory_history` is off, this rank is
    not in `profile_ranks` (an empty list selects no rank), or CUDA is not available. A snapshot is a pickle for
    https://pytorch.org/memory_viz.
    """
    if profiling is None or not profiling.record_memory_history or not torch.cuda.is_available():
        return
    rank = shards.rank()
    if rank not in profiling.profile_ranks:
        return
    record_memory_history(MAX_EVENTS, stacks="python")
    path = Path(profiling.memory_snapshot_path)
    out_of_memory = path.with_name(f"{path.stem}_oom_rank-{rank}{path.suffix}")

    def save_when_out_of_memory(device: int, alloc: int, device_alloc: int, device_free: int) -> None:
        write_memory_snapshot(out_of_memory)
        logger.warning("[OOM] rank %d saved memory snapshot to %s", rank, out_of_memory)

    attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    attach(save_when_out_of_memory)
    if rank == 0:
        text = f"Memory history recording enabled (rank {rank}); snapshots will be written to '{path}'."
        print(text, flush=True)  # noqa: T201 - Bridge's line


def save_memory_snapshot(profiling: ProfilingConfig | None, step: int) -> Path | None:
    """Write the recorded history at `profile_step_end` on the ranks that record; returns the file, else None."""
    if profiling is None or not profiling.record_memory_history or step != profiling.profile_step_end:
        return None
    rank = shards.rank()
    if rank not in profiling.profile_ranks or not torch.cuda.is_available():
        return None
    base = Path(profiling.memory_snapshot_path)
    path = base.with_name(f"{base.stem}_{rank}{base.suffix}")
    write_memory_snapshot(path)
    if rank == 0:
        print(f"Saved memory snapshot to {path}", flush=True)  # noqa: T201 - Bridge's line
    return path


def record_memory_history(max_events: int | None, stacks: str = "all") -> None:
    """Make CUDA's allocator record up to `max_events` events with their origin; None stops and clears recording."""
    if max_events is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=max_events, stacks=stacks)


def write_memory_snapshot(path: Path) -> None:
    """Write the recorded memory history; creates the directory if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
