"""The history of CUDA's allocations: recorded from before the model is built, written as a snapshot."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onstep.config.reporting import ProfilingConfig

logger = logging.getLogger(__name__)

MAX_EVENTS = 100_000
"""Allocations and releases that are remembered."""


def start_memory_history_recording(profiling: ProfilingConfig | None) -> None:
    """Let CUDA's allocator remember where memory was taken, and write a snapshot when it runs out.

    Call it before the model is built. Does nothing where `profiling` is None, `record_memory_history` is off, this
    rank is not in `profile_ranks` (an empty list names no rank), or there is no CUDA. A snapshot is a pickle that
    https://pytorch.org/memory_viz reads.
    """
    if profiling is None or not profiling.record_memory_history or not torch.cuda.is_available():
        return
    rank = _rank()
    if rank not in profiling.profile_ranks:
        return
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python")
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
    """Write the recorded history at `profile_step_end`, on the ranks that record; the file, or None at other times."""
    if profiling is None or not profiling.record_memory_history or step != profiling.profile_step_end:
        return None
    rank = _rank()
    if rank not in profiling.profile_ranks or not torch.cuda.is_available():
        return None
    base = Path(profiling.memory_snapshot_path)
    path = base.with_name(f"{base.stem}_{rank}{base.suffix}")
    write_memory_snapshot(path)
    if rank == 0:
        print(f"Saved memory snapshot to {path}", flush=True)  # noqa: T201 - Bridge's line
    return path


def write_memory_snapshot(path: Path) -> None:
    """Write what the allocator remembers; the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
