"""The peak of CUDA memory of every rank, and a snapshot of its allocations."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from onstep.events import TrainerCallback
from onstep.metrics.formatting import format_gib
from onstep.metrics.memory import MAX_EVENTS, record_memory_history, write_memory_snapshot

logger: logging.Logger = logging.getLogger(__name__)


class CudaMemory:
    """What `PeakMemory` asks of torch's CUDA allocator, of this process's device."""

    def is_available(self) -> bool:
        """Whether there is a CUDA device."""
        return torch.cuda.is_available()

    def peak_bytes(self) -> int:
        """Most bytes allocated since the statistics were reset."""
        return int(torch.cuda.max_memory_allocated())

    def details(self) -> str:
        """The allocator's own table of statistics."""
        return str(torch.cuda.memory_summary())

    def start_history(self) -> None:
        """Record allocations with their stacks from now on."""
        record_memory_history(2 * MAX_EVENTS)

    def stop_history(self) -> None:
        """Record no more, and let go of what was recorded."""
        record_memory_history(None)

    def dump_history(self, path: str) -> None:
        """Write what was recorded, for https://pytorch.org/memory_viz."""
        write_memory_snapshot(Path(path))


class PeakMemory(TrainerCallback):
    """Reports the peak of allocated CUDA memory of every rank, during training and at its end.

    While training it reads `peak_mem_allocated` of the logs, a list of one number a rank, since the loop resets torch's
    statistics at each logged step. At the end every rank logs its own maximum. Without CUDA, or in a run on the CPU, it
    does nothing.

    Args:
        summary_writer: a TensorBoard `SummaryWriter`; gets the scalars `peak_memory_rank<i>` (bytes) at logged steps.
        show_details: report the allocator's statistics as well: the text `peak_memory_details` in TensorBoard; in the
            log at logged steps with `do_log`, else at the end.
        do_log: log a line with the peak of every rank at logged steps.
        enable_memory_snapshot: record every allocation with its stack, and write the history of each rank to
            ``<file_prefix>_rank<R>.pickle`` when training ends, also by an exception such as running out of memory.
            Recording takes up to about 1 GB of host memory.
        file_prefix: path of the snapshots without their ending, relative to the working folder.

    Attributes:
        rank: this process's rank.
        world_size: number of ranks.
        summary_writer: as given.
        enabled: whether CUDA is available and the run uses it; known when training begins.
        show_details: as given.
        do_log: as given.
        enable_memory_snapshot: as given.
        max_allocated: most bytes that this rank has had allocated in the training that began last.
    """

    def __init__(
        self,
        summary_writer: Any = None,
        show_details: bool = False,
        do_log: bool = False,
        enable_memory_snapshot: bool = False,
        file_prefix: str = "memory_snapshot",
    ) -> None:
        self.rank = int(os.environ.get("RANK") or 0)
        self.world_size = int(os.environ.get("WORLD_SIZE") or 1)
        self.summary_writer = summary_writer
        self.enabled = False
        self.show_details = show_details
        self.do_log = do_log
        self.enable_memory_snapshot = enable_memory_snapshot
        self.file_prefix = file_prefix
        self.max_allocated = 0
        self.memory = CudaMemory()
        """Where the numbers come from; replace it to report on another allocator."""
        self._records_history = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start anew, and record allocations where a snapshot is wanted."""
        self._stop_history()
        self.rank = getattr(state, "rank", self.rank)
        self.world_size = getattr(state, "num_processes", self.world_size)
        self.max_allocated = 0
        self.enabled = self.memory.is_available() and _is_cuda(getattr(args, "device", "cuda"))
        if self.enabled and self.enable_memory_snapshot:
            self.memory.start_history()
            self._records_history = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Take up the peaks of all ranks, and report them on rank 0."""
        peaks = logs.get("peak_mem_allocated")
        if not self.enabled or not peaks:
            return
        if self.rank < len(peaks):
            self.max_allocated = max(self.max_allocated, int(peaks[self.rank]))
        if not state.is_world_process_zero:
            return
        if self.summary_writer is not None:
            self._write(peaks, state.global_step)
        if self.do_log:
            logger.info("Peak CUDA Memory Allocated: %s", listed(peaks))
            if self.show_details:
                logger.info("%s", self.memory.details())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report this rank's maximum, and write its snapshot."""
        if not self.enabled:
            return
        self.max_allocated = max(self.max_allocated, self.memory.peak_bytes())
        logger.info("RANK%d MAX CUDA MEMORY ALLOCATED: %s", self.rank, format_gib(self.max_allocated))
        if self.show_details and not self.do_log:
            logger.info("%s", self.memory.details())
        self._write_snapshot()

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record no more."""
        self._stop_history()

    def _write(self, peaks: Sequence[int], step: int) -> None:
        for rank, peak in enumerate(peaks):
            self.summary_writer.add_scalar(f"peak_memory_rank{rank}", peak, step)
        if self.show_details:
            self.summary_writer.add_text("peak_memory_details", f"```\n{self.memory.details()}\n```", step)
        self.summary_writer.flush()

    def _write_snapshot(self) -> None:
        """A disk without room costs the snapshot, not the trained model."""
        if not self._records_history:
            return
        path = Path(f"{self.file_prefix}_rank{self.rank}.pickle")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.memory.dump_history(str(path))
            logger.info("the memory history of rank %d is in %s", self.rank, path)
        except OSError as error:
            logger.warning("the memory history of rank %d could not be written to %s: %s", self.rank, path, error)
        self._stop_history()

    def _stop_history(self) -> None:
        if self._records_history:
            self._records_history = False
            self.memory.stop_history()


def listed(peaks: Sequence[int]) -> str:
    """The peak of every rank in words.

    >>> listed([1 << 30, 3 << 29])
    'RANK0 1.000 GiB, RANK1 1.500 GiB'
    """
    return ", ".join(f"RANK{rank} {format_gib(peak)}" for rank, peak in enumerate(peaks))


def _is_cuda(device: Any) -> bool:
    """Whether `args.device`, a `torch.device` or its name, is a CUDA device."""
    return str(getattr(device, "type", device)).startswith("cuda")
