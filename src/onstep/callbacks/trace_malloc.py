"""Looks for memory that a run takes and does not give back."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from typing import Any

from onstep.errors import ConfigError, MissingExtraError
from onstep.events import TrainerCallback
from onstep.metrics.formatting import format_gib

logger: logging.Logger = logging.getLogger(__name__)

_MIB = 2**20


class TraceMalloc(TrainerCallback):
    """Logs, at every log, how the memory of rank 0 has grown and which lines of Python took it.

    Python's own `tracemalloc` sees what Python objects hold, not the storage of tensors; the process's and the GPU's
    numbers show that. Tracing makes Python several times slower: for looking into a leak, not for daily runs.

    A log at which PyTorch's profiler records has no report; the next one has what has grown since the last report.

    Args:
        top_k: lines of code to name, those that grew the most.
        monitor_system_memory: report the process's resident and virtual memory (needs psutil) and the GPU's.
        comprehensive_mode: besides the growth since the previous log, report the growth since training began, and how
            many objects and tensors there are.

    Raises:
        ConfigError: for a `top_k` that is no whole number >= 1.
        MissingExtraError: where training begins and psutil is missing, with `monitor_system_memory`.
    """

    ranks = "main"

    def __init__(self, top_k: int = 10, monitor_system_memory: bool = True, comprehensive_mode: bool = True) -> None:
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ConfigError(f"top_k must be a whole number >= 1, got {top_k!r}; the default is 10.")
        self.top_k = top_k
        self.monitor_system_memory = monitor_system_memory
        self.comprehensive_mode = comprehensive_mode
        self._process: Any = None
        self._system_before: dict[str, int] = {}
        self._owns_trace = False
        self._first: tracemalloc.Snapshot | None = None
        self._latest: tracemalloc.Snapshot | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start tracing, unless somebody does already."""
        self._stop()
        if self.monitor_system_memory:
            self._process = _this_process()
            self._system_before = self._system_memory()
        if not tracemalloc.is_tracing():
            tracemalloc.start()
            self._owns_trace = True
        self._first = self._latest = _snapshot()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what has grown since the previous log."""
        if self._first is None or self._latest is None or not tracemalloc.is_tracing():
            return
        if _is_profiled():
            logger.info("no memory report at step %d, where a profiler records", state.global_step)
            return
        now = _snapshot()
        lines = [f"memory at step {state.global_step}"]
        lines += self._system_lines()
        current, peak = tracemalloc.get_traced_memory()
        lines.append(f"  Python objects: {current / _MIB:.2f} MiB, at most {peak / _MIB:.2f} MiB")
        lines += self._growth("the previous log", now, self._latest)
        if self.comprehensive_mode:
            lines += self._growth("the start of training", now, self._first)
            lines.append("  {} objects, {} of them tensors".format(*_count_objects()))
        self._latest = now
        logger.info("%s", "\n".join(lines))

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop tracing what this callback started."""
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
        """Bytes by name."""
        import torch

        memory = self._process.memory_info()
        sizes = {"resident (RSS)": memory.rss, "virtual (VMS)": memory.vms}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            sizes |= {
                "GPU allocated": torch.cuda.memory_allocated(),
                "GPU reserved": torch.cuda.memory_reserved(),
            }
        return sizes


def _snapshot() -> tracemalloc.Snapshot:
    """What Python holds now, without what the tracing itself does."""
    ignored = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
    return tracemalloc.take_snapshot().filter_traces(ignored)


def _is_profiled() -> bool:
    """Whether PyTorch's profiler records: with stacks it would record each of the million calls of a report."""
    import torch

    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def _count_objects() -> tuple[int, int]:
    """Objects that the garbage collector knows, and how many of them are tensors."""
    import torch

    objects = gc.get_objects()
    # by type: isinstance would ask lazy modules and proxies, which may answer with an import
    return len(objects), sum(issubclass(type(one), torch.Tensor) for one in objects)


def _this_process() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise MissingExtraError(
            "TraceMalloc(monitor_system_memory=True) needs psutil; install it: pip install 'onstep[diagnostics]', or "
            "pass monitor_system_memory=False."
        ) from error
    return psutil.Process()
