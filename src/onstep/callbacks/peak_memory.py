"""Reports memory use: `PeakMemory` for GPU peaks, `TraceMalloc` for growth of the Python process."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onstep.config import TrainingArguments
from onstep.config.field_types import is_integer_from
from onstep.console.formats import format_gib
from onstep.distributed.shards import world_size
from onstep.errors import extra, require
from onstep.events import RunState, TrainerCallback
from onstep.files.bounded_reading import integer_from_environment
from onstep.metrics.memory_reports import MAX_EVENTS, record_memory_history, write_memory_snapshot
from onstep.record.kinds import Metrics

logger: logging.Logger = logging.getLogger(__name__)

_MIB = 2**20


class CudaMemory:
    """Interface of `PeakMemory` to torch's CUDA allocator on this process's device."""

    def is_available(self) -> bool:
        """Whether there is a CUDA device."""
        return torch.cuda.is_available()

    def peak_bytes(self) -> int:
        """Peak bytes allocated since the statistics were reset."""
        return int(torch.cuda.max_memory_allocated())

    def details(self) -> str:
        """The allocator's table of statistics."""
        return str(torch.cuda.memory_summary())

    def start_history(self) -> None:
        """Record allocations with their stacks from now on."""
        record_memory_history(2 * MAX_EVENTS)

    def stop_history(self) -> None:
        """Stop recording and discard what was recorded."""
        record_memory_history(None)

    def dump_history(self, path: str) -> None:
        """Write the recorded history, for https://pytorch.org/memory_viz."""
        write_memory_snapshot(Path(path))


@dataclass(eq=False, repr=False)
class PeakMemory(TrainerCallback):
    """Reports the peak of allocated CUDA memory of every rank, during training and at its end.

    During training it reads `peak_mem_allocated` from the logs, a list with one number per rank, since the loop resets
    torch's statistics at each logged step. At the end, every rank logs its own maximum. Without CUDA, or in a run on
    the CPU, it does nothing.

    Args:
        summary_writer: a TensorBoard `SummaryWriter`; gets the scalars `peak_memory_rank<i>` (bytes) at logged steps.
        show_details: also report the allocator's statistics: as the text `peak_memory_details` in TensorBoard, and in
            the log, at logged steps with `do_log`, otherwise at the end.
        do_log: log a line with the peak of every rank at logged steps.
        enable_memory_snapshot: record every allocation with its stack, and write the history of each rank to
            ``<file_prefix>_rank<R>.pickle`` when training ends, including by an exception such as an out-of-memory
            error. Recording uses up to about 1 GB of host memory.
        file_prefix: path of the snapshots without the suffix, relative to the working directory.

    Attributes:
        rank: this process's rank.
        world_size: number of ranks.
        enabled: whether CUDA is available and used by the run; set when training begins.
        max_allocated: peak bytes allocated on this rank since training last began.
    """

    reads_weights = False

    summary_writer: Any = None
    show_details: bool = False
    do_log: bool = False
    enable_memory_snapshot: bool = False
    file_prefix: str = "memory_snapshot"

    def __post_init__(self) -> None:
        self.rank = integer_from_environment("RANK", 0)
        self.world_size = integer_from_environment("WORLD_SIZE", 1)
        self.enabled = False
        self.max_allocated = 0
        self.memory = CudaMemory()
        """Source of the numbers; replace it to report on another allocator."""
        self._records_history = False

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Reset the maximum, and start recording allocations if a snapshot is requested."""
        self._stop_history()
        self.rank = getattr(state, "rank", self.rank)
        self.world_size = max(getattr(state, "num_processes", 1), world_size())
        self.max_allocated = 0
        device = getattr(args, "device", "cuda")
        self.enabled = self.memory.is_available() and str(device).startswith("cuda")
        if self.enabled and self.enable_memory_snapshot:
            self.memory.start_history()
            self._records_history = True

    def on_log(self, args: object, state: RunState, control: object, logs: Metrics, **kwargs: object) -> None:
        """Record this rank's peak, and report the peaks of all ranks on rank 0."""
        peaks = logs.get("peak_mem_allocated")
        if not self.enabled or not peaks:
            return
        if self.rank < len(peaks):
            self.max_allocated = max(self.max_allocated, int(peaks[self.rank]))
        if not state.is_world_process_zero:
            return
        if self.summary_writer is not None:
            for rank, peak in enumerate(peaks):
                self.summary_writer.add_scalar(f"peak_memory_rank{rank}", peak, state.global_step)
            if self.show_details:
                details = f"```\n{self.memory.details()}\n```"
                self.summary_writer.add_text("peak_memory_details", details, state.global_step)
            self.summary_writer.flush()
        if self.do_log:
            shown = ", ".join(f"RANK{rank} {format_gib(peak)}" for rank, peak in enumerate(peaks))
            logger.info("Peak CUDA Memory Allocated: %s", shown)
            if self.show_details:
                logger.info("%s", self.memory.details())

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Report this rank's maximum and write its snapshot."""
        if not self.enabled:
            return
        self.max_allocated = max(self.max_allocated, self.memory.peak_bytes())
        logger.info("RANK%d MAX CUDA MEMORY ALLOCATED: %s", self.rank, format_gib(self.max_allocated))
        if self.show_details and not self.do_log:
            logger.info("%s", self.memory.details())
        self._write_snapshot()

    def on_run_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Stop recording."""
        self._stop_history()

    def _write_snapshot(self) -> None:
        """Write the snapshot; a full disk only causes a warning."""
        if not self._records_history:
            return
        path = Path(f"{self.file_prefix}_rank{self.rank}.pickle")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.memory.dump_history(str(path))
            logger.info("the memory history of rank %d is in %s", self.rank, path)
        except OSError as error:
            logger.warning("cannot write the memory history of rank %d to %s: %s", self.rank, path, error)
        self._stop_history()

    def _stop_history(self) -> None:
        if self._records_history:
            self._records_history = False
            self.memory.stop_history()


@dataclass(eq=False, repr=False)
class TraceMalloc(TrainerCallback):
    """Logs, at every logged step, how much the memory of rank 0 grew and which Python lines allocated it.

    Python's `tracemalloc` sees the memory of Python objects, not the storage of tensors, which shows in the numbers of
    the process and the GPU. Tracing slows Python down several times: use it to find a leak, not in regular runs.

    There is no report while PyTorch's profiler records; the next report covers the time since the last one.

    Args:
        top_k: number of code lines to list, by growth.
        monitor_system_memory: report the process's resident and virtual memory (requires psutil) and the GPU's memory.
        comprehensive_mode: besides the growth since the previous report, report the growth since training began and the
            numbers of objects and tensors.

    Raises:
        ConfigError: if `top_k` is not an integer >= 1.
        MissingExtraError: when training begins, if psutil is missing with `monitor_system_memory`.
    """

    reads_weights = False

    ranks = "main"
    top_k: int = 10
    monitor_system_memory: bool = True
    comprehensive_mode: bool = True

    def __post_init__(self) -> None:
        require(is_integer_from(self.top_k, 1), "top_k", "an integer >= 1", self.top_k, "; the default is 10.")
        self._process: Any = None
        self._system_before: dict[str, int] = {}
        self._owns_trace = False
        self._first: tracemalloc.Snapshot | None = None
        self._latest: tracemalloc.Snapshot | None = None

    def on_train_begin(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Start tracing, unless tracing is already active."""
        self._stop()
        if self.monitor_system_memory:
            what = "TraceMalloc(monitor_system_memory=True) requires psutil"
            with extra("diagnostics", what, ", or pass monitor_system_memory=False."):
                import psutil
            self._process = psutil.Process()
            self._system_before = self._system_memory()
        if not tracemalloc.is_tracing():
            tracemalloc.start()
            self._owns_trace = True
        self._first = self._latest = _snapshot()

    def on_log(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Report the growth since the previous report."""
        if self._first is None or self._latest is None or not tracemalloc.is_tracing():
            return
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            # a profiler with stacks would record each of the million calls of a report
            logger.info("no memory report at step %d: a profiler is recording", state.global_step)
            return
        now = _snapshot()
        lines = [f"memory at step {state.global_step}", *self._system_lines()]
        current, peak = tracemalloc.get_traced_memory()
        lines.append(f"  Python objects: {current / _MIB:.2f} MiB, at most {peak / _MIB:.2f} MiB")
        lines += self._growth("the previous log", now, self._latest)
        if self.comprehensive_mode:
            lines += self._growth("the start of training", now, self._first)
            objects = gc.get_objects()
            # by type: isinstance would query lazy modules and proxies, which might trigger an import
            num_tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
            lines.append(f"  {len(objects)} objects, {num_tensors} of them tensors")
        self._latest = now
        logger.info("%s", "\n".join(lines))

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Stop tracing if this callback started it; in Hugging Face's own Trainer, no other event follows."""
        self._stop()

    def on_run_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Stop tracing also where training ended with an error."""
        self._stop()

    def _stop(self) -> None:
        if self._owns_trace and tracemalloc.is_tracing():
            tracemalloc.stop()
        self._owns_trace = False
        self._first = self._latest = None

    def _growth(self, since: str, now: tracemalloc.Snapshot, before: tracemalloc.Snapshot) -> list[str]:
        grown = [one for one in now.compare_to(before, "lineno") if one.size_diff > 0]
        grown.sort(key=lambda one: one.size_diff, reverse=True)
        lines = [f"  grown since {since}: {sum(one.size_diff for one in grown) / _MIB:.3f} MiB at {len(grown)} lines"]
        for one in grown[: self.top_k]:
            place = one.traceback[0]
            size, blocks = one.size_diff / 1024, one.count_diff
            lines.append(f"    {size:+10.1f} KiB {blocks:+7d} blocks  {place.filename}:{place.lineno}")
        return lines

    def _system_lines(self) -> list[str]:
        if not self.monitor_system_memory:
            return []
        now, before = self._system_memory(), self._system_before
        self._system_before = now
        return [
            f"  {name}: {format_gib(size)} ({(size - before.get(name, size)) / _MIB:+.2f} MiB)"
            for name, size in now.items()
        ]

    def _system_memory(self) -> dict[str, int]:
        """Memory sizes in bytes, by name."""
        memory = self._process.memory_info()
        sizes = {"resident (RSS)": memory.rss, "virtual (VMS)": memory.vms}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            sizes |= {
                "GPU allocated": torch.cuda.memory_allocated(),
                "GPU reserved": torch.cuda.memory_reserved(),
            }
        return sizes


def _snapshot() -> tracemalloc.Snapshot:
    """A snapshot of Python's allocations, without those of the tracing itself."""
    ignored = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
    return tracemalloc.take_snapshot().filter_traces(ignored)
