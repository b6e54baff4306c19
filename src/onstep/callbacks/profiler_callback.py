"""Profiles a few training steps with PyTorch's profiler and writes a trace of them."""

from __future__ import annotations

import logging
import tracemalloc
import weakref
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path

import torch
from torch.profiler import ProfilerAction

from onstep.errors import ConfigError
from onstep.events import RunState, TrainerCallback
from onstep.files.bounded_reading import integer_from_environment
from onstep.metrics.torch_profiler import SoleProfiler, is_recording, write_trace

logger: logging.Logger = logging.getLogger(__name__)

_active: weakref.WeakSet[ProfilerCallback] = weakref.WeakSet()
"""Callbacks of this process that are in training, at most one: a second profiler would crash the process."""


class ProfilerCallback(TrainerCallback):
    """Profiles `num_steps` training steps on every rank, and exports a Chrome trace and summary tables.

    Each rank writes ``<output_dir>/real_training_rank<R>.json``, for Perfetto or chrome://tracing; rank 0 prints the
    operations sorted by CPU time and, with a GPU, by GPU time. Every step appears in the trace as ``step <n>``,
    numbered as in the logs. The window is counted from this process's first step, so resumed runs are profiled too. If
    fewer steps than the window remain, the window starts earlier and shrinks; a run that ends inside the window, even
    by an exception, writes what was recorded. An incomplete trace only causes a warning.

    PyTorch supports one profiler per process. A second ProfilerCallback in a run is therefore rejected, and so is one
    inside a profiler of your own; if yours is recording when the window begins, nothing is profiled and a warning is
    logged.

    Args:
        start_step: number of steps of this process before the window.
        num_steps: number of steps to record.
        output_dir: directory of the traces, created if missing.
        with_stack: record the Python stack of each operation (costs time and space, mostly in the export, which blocks
            this rank).
        with_flops: estimate the FLOPs of matrix products and convolutions.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations.
        warmup_steps: steps right before the window during which the profiler runs but discards its results.

    Raises:
        ConfigError: for an invalid window; when training begins, if `output_dir` cannot be created or another profiler
            is active.
    """

    reads_weights = False
    is_profiler = True
    """Makes a run reject `profiling.use_pytorch_profiler` in combination with this callback."""

    def __init__(
        self,
        start_step: int = 3,
        num_steps: int = 5,
        output_dir: str = "benchmarks/profiles",
        with_stack: bool = True,
        with_flops: bool = True,
        record_shapes: bool = True,
        *,
        profile_memory: bool = False,
        warmup_steps: int = 1,
    ) -> None:
        for name, value, least in (
            ("start_step", start_step, 0),
            ("num_steps", num_steps, 1),
            ("warmup_steps", warmup_steps, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
                raise ConfigError(
                    f"{name} must be an integer >= {least}, got {value!r}; the defaults of start_step, num_steps "
                    "and warmup_steps are 3, 5 and 1."
                )
        self.start_step = start_step
        self.num_steps = num_steps
        self.output_dir = output_dir
        self.with_stack = with_stack
        self.with_flops = with_flops
        self.record_shapes = record_shapes
        self.profile_memory = profile_memory
        self.warmup_steps = warmup_steps
        self.trace_path: Path | None = None
        """Path of this rank's latest trace."""
        self._profiler: SoleProfiler | None = None
        self._step_mark: AbstractContextManager[object] | None = None
        self._window = range(0)
        """Steps to record, counted from this process's first step."""
        self._is_due = False
        self._is_over = False
        """Whether recording is finished for this training."""

    def on_train_begin(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Determine which steps to record."""
        self._close()
        self.trace_path, self._is_due, self._is_over, self._window = None, False, False, range(0)
        if is_recording():
            raise ConfigError(
                "ProfilerCallback cannot run inside another profiler, which is recording; stop that one before "
                "training, or drop the callback."
            )
        other = next(iter(_active), None)
        if other is not None:
            raise ConfigError(
                f"a process can have one ProfilerCallback, and one is already active (output_dir="
                f"{other.output_dir!r}); drop one of them, or profile in two runs."
            )
        try:
            Path(self.output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot create output_dir={self.output_dir!r}: {error}; choose a writable directory for the traces."
            ) from error
        limit, done = state.max_steps, state.global_step
        self._window = _window(self.start_step, self.num_steps, limit - done if limit > 0 else None)
        self._is_due = True
        _active.add(self)

    def on_step_begin(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Start the profiler before the first step, and mark the step."""
        if self._is_due:
            self._is_due = False
            # without a rank in the state, torchrun's environment provides it
            self._profiler = self._build(int(getattr(state, "rank", integer_from_environment("RANK", 0))))
            self._profiler.start()
        if self._profiler is not None and not self._profiler.gave_way:
            mark: AbstractContextManager[object] = torch.profiler.record_function(f"step {state.global_step + 1}")
            mark.__enter__()
            self._step_mark = mark

    def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Advance the profiler to the next step; stop it after the last step of the window."""
        if self._profiler is None:
            return
        self._end_step()
        self._profiler.step()
        if self._is_over or self._profiler.gave_way:
            self._close()

    def on_exception(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Write what was recorded."""
        self._close()

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Write what was recorded if training ends inside the window."""
        self._close()
        if not self._is_over and self._window:
            logger.warning(
                "training ended before step %d of this process, so nothing was profiled; lower start_step=%d",
                self._window.start + 1,
                self.start_step,
            )

    def on_run_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Stop a profiler that is still active."""
        self._close()

    def _build(self, rank: int) -> SoleProfiler:
        cpu, gpu = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
        made = torch.profiler.profile(
            activities={cpu, gpu} & torch.profiler.supported_activities(),  # type: ignore[no-untyped-call]
            schedule=self._action,
            on_trace_ready=lambda finished: self._export(finished, rank),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )
        return SoleProfiler(made, "ProfilerCallback")

    def _action(self, step: int) -> ProfilerAction:
        """The profiler's action at a step, counted from this process's first step."""
        if step in self._window:
            return ProfilerAction.RECORD_AND_SAVE if step == self._window[-1] else ProfilerAction.RECORD
        if self._window.start - self.warmup_steps <= step < self._window.start:
            return ProfilerAction.WARMUP
        return ProfilerAction.NONE

    def _export(self, profiler: torch.profiler.profile, rank: int) -> None:
        self._is_over = True
        path = Path(self.output_dir) / f"real_training_rank{rank}.json"
        if self.with_stack:
            logger.warning(
                "writing the trace of %d steps with Python stacks; this blocks training and can take long (to speed it "
                "up, use with_stack=False or fewer num_steps)",
                len(self._window),
            )
            if tracemalloc.is_tracing():
                logger.warning("tracemalloc is tracing, which makes it about 10x slower; drop TraceMalloc")
        if not write_trace(profiler, path):
            return
        self.trace_path = path
        if rank != 0:
            return
        try:
            averages = profiler.key_averages()
        except UnicodeDecodeError as error:  # in forked processes, the profiler rarely corrupts names of frames
            logger.warning("cannot create the profiler's tables (%s); the trace is in %s", error, path)
            return
        print(averages.table(sort_by="cpu_time_total", row_limit=30))  # noqa: T201 - printing the tables is the purpose
        if any(event.device_time_total > 0 for event in averages):
            print(averages.table(sort_by="device_time_total", row_limit=30))  # noqa: T201 - as above
        logger.info("profiled %d steps: %s", len(self._window), path)

    def _end_step(self) -> None:
        mark, self._step_mark = self._step_mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _close(self) -> None:
        """Stop the profiler; if it is recording, it exports what it has."""
        self._end_step()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            self._is_over = self._is_over or profiler.gave_way
        _active.discard(self)


def _window(start: int, length: int, steps_left: int | None) -> range:
    """The steps to record: the requested ones, or as many as fit before the end."""
    if steps_left is not None and start + length > steps_left:
        start = max(0, min(start, steps_left - length))
        length = min(length, max(0, steps_left))
    return range(start, start + length)
