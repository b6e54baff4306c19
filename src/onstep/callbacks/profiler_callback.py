"""Profiles a few training steps and writes a trace of them."""

from __future__ import annotations

import logging
import os
import tracemalloc
import weakref
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from onstep.errors import ConfigError
from onstep.events import TrainerCallback
from onstep.metrics.torch_profiler import SoleProfiler, is_recording, write_trace

logger: logging.Logger = logging.getLogger(__name__)

_active: weakref.WeakSet[ProfilerCallback] = weakref.WeakSet()
"""Callbacks of this process whose training goes on, at most one: a second profiler ends the process by a fault."""


class ProfilerCallback(TrainerCallback):
    """Profiles `num_steps` training steps of every rank, and exports a Chrome trace and summary tables.

    Each rank writes ``<output_dir>/real_training_rank<R>.json``, for Perfetto or chrome://tracing; rank 0 prints the
    operations by their time on the CPU and, with a GPU, on the GPU. Every step stands in the trace as ``step <n>``,
    with the number that the logs have. Steps count from this process's first one, so a resumed run is profiled too.
    Where fewer steps than the window are left, the window moves forward and shrinks; a run that ends unexpectedly
    inside it, also by an exception, writes what there is. A trace that could not be written whole costs a warning.

    PyTorch has one profiler for a process. So a second ProfilerCallback of a run is refused, and one inside a profiler
    of your own; where yours records at the beginning of the window, nothing is profiled and a warning says so.

    Args:
        start_step: steps of this process to let pass first.
        num_steps: steps to record.
        output_dir: folder of the traces, made where it is missing.
        with_stack: record the Python stack of each operation (costs time and space, above all for the export, in which
            this rank stands still).
        with_flops: estimate the FLOPs of matrix products and convolutions.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations.
        warmup_steps: steps right before the window in which the profiler runs already and records nothing.

    Raises:
        ConfigError: for a window that is none; when training begins, for an `output_dir` that cannot be made, and where
            there is another profiler.
    """

    is_profiler = True
    """`profiling.use_pytorch_profiler` is refused beside it."""

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
                    f"{name} must be a whole number >= {least}, got {value!r}; the defaults of start_step, num_steps "
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
        """This rank's latest trace."""
        self._profiler: SoleProfiler | None = None
        self._step_mark: AbstractContextManager[object] | None = None
        self._window = range(0)
        """Steps to record, counted from this process's first."""
        self._is_due = False
        self._is_over = False
        """Whether there is nothing more to record in this training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Settle which steps are recorded."""
        self._close()
        self.trace_path, self._is_due, self._is_over, self._window = None, False, False, range(0)
        if is_recording():
            raise ConfigError(
                "ProfilerCallback cannot profile inside another profiler, and one is recording; end that one before "
                "training, or leave the callback out."
            )
        other = next(iter(_active), None)
        if other is not None:
            raise ConfigError(
                f"a process has one profiler, there is a ProfilerCallback already (output_dir={other.output_dir!r}); "
                "leave one of them out, or profile in two runs."
            )
        try:
            Path(self.output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output_dir={self.output_dir!r} cannot be made: {error}; name a folder that can hold the traces."
            ) from error
        limit, done = state.max_steps, state.global_step
        self._window = _window(self.start_step, self.num_steps, limit - done if limit > 0 else None)
        self._is_due = True
        _active.add(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the profiler before the first step, and mark the step."""
        if self._is_due:
            self._is_due = False
            # a state without a rank is of a run that torchrun's environment describes
            self._profiler = self._made(int(getattr(state, "rank", os.environ.get("RANK") or 0)))
            self._profiler.start()
        if self._profiler is not None and not self._profiler.gave_way:
            mark: AbstractContextManager[object] = torch.profiler.record_function(f"step {state.global_step + 1}")
            mark.__enter__()
            self._step_mark = mark

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on to the next step; after the last one of the window, end the profiler."""
        if self._profiler is None:
            return
        self._end_step()
        self._profiler.step()
        if self._is_over or self._profiler.gave_way:
            self._close()

    def on_exception(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what was recorded."""
        self._close()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what was recorded, where the training ended before the window did."""
        self._close()
        if not self._is_over and self._window:
            logger.warning(
                "the training ended before step %d of this process: nothing was profiled; lower start_step=%d",
                self._window.start + 1,
                self.start_step,
            )

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave no profiler open."""
        self._close()

    def _made(self, rank: int) -> SoleProfiler:
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
        """What the profiler does at a step, counted from this process's first."""
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
                "writing the trace of %d steps with Python's stack; training waits, and this may take long (faster: "
                "with_stack=False, or fewer num_steps)",
                len(self._window),
            )
            if tracemalloc.is_tracing():
                logger.warning("tracemalloc is tracing, which makes it some ten times as long; leave TraceMalloc out")
        if not write_trace(profiler, path):
            return
        self.trace_path = path
        if rank != 0:
            return
        try:
            averages = profiler.key_averages()
        except UnicodeDecodeError as error:  # the profiler loses names of Python frames, rarely, in forked processes
            logger.warning("the profiler's tables cannot be made (%s); the trace is in %s", error, path)
            return
        print(averages.table(sort_by="cpu_time_total", row_limit=30))  # noqa: T201 - the tables are what was asked for
        if any(event.device_time_total > 0 for event in averages):
            print(averages.table(sort_by="device_time_total", row_limit=30))  # noqa: T201 - as above
        logger.info("profiled %d steps: %s", len(self._window), path)

    def _end_step(self) -> None:
        mark, self._step_mark = self._step_mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _close(self) -> None:
        """Stop the profiler; one that was recording exports what it has."""
        self._end_step()
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            self._is_over = self._is_over or profiler.gave_way
        _active.discard(self)


def _window(start: int, length: int, steps_left: int | None) -> range:
    """The steps to record: those asked for, else as many before the end as there are."""
    if steps_left is not None and start + length > steps_left:
        start = max(0, min(start, steps_left - length))
        length = min(length, max(0, steps_left))
    return range(start, start + length)
