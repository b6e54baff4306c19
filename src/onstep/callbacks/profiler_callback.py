"""Profiles a few training steps and writes a trace of them."""

from __future__ import annotations

import logging
import os
import tracemalloc
import weakref
from numbers import Integral
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError
from onstep.events import TrainerCallback

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
        self._profiler: Any = None
        self._step_mark: Any = None
        self._window = range(0)
        """Steps to record, counted from this process's first."""
        self._is_due = False
        self._is_over = False
        """Whether there is nothing more to record in this training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Settle which steps are recorded."""
        self._close()
        self.trace_path, self._is_due, self._is_over, self._window = None, False, False, range(0)
        self._check_that_there_is_no_other()
        self._make_folder()
        limit, done = state.max_steps, state.global_step
        self._window = _window(self.start_step, self.num_steps, limit - done if limit > 0 else None)
        self._is_due = True
        _active.add(self)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the profiler before the first step, and mark the step."""
        import torch

        if self._is_due:
            self._is_due = False
            if not self._is_in_the_way():
                self._profiler = self._start(rank_of(state))
        if self._profiler is not None:
            self._step_mark = torch.profiler.record_function(f"step {state.global_step + 1}")
            self._step_mark.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on to the next step; after the last one of the window, end the profiler."""
        if self._profiler is None:
            return
        self._end_step()
        if self._is_in_the_way():
            return
        self._profiler.step()
        if self._is_over:
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

    def _start(self, rank: int) -> Any:
        from torch import profiler

        cpu, gpu = profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA
        activities = {cpu, gpu} & profiler.supported_activities()  # type: ignore[no-untyped-call]
        started = profiler.profile(
            activities=activities,
            schedule=self._action,
            on_trace_ready=lambda finished: self._export(finished, rank),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )
        started.start()
        return started

    def _action(self, step: int) -> Any:
        """What the profiler does at a step, counted from this process's first."""
        from torch.profiler import ProfilerAction

        if step in self._window:
            return ProfilerAction.RECORD_AND_SAVE if step == self._window[-1] else ProfilerAction.RECORD
        if self._window.start - self.warmup_steps <= step < self._window.start:
            return ProfilerAction.WARMUP
        return ProfilerAction.NONE

    def _check_that_there_is_no_other(self) -> None:
        import torch

        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
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

    def _make_folder(self) -> None:
        try:
            Path(self.output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output_dir={self.output_dir!r} cannot be made: {error}; name a folder that can hold the traces."
            ) from error

    def _is_in_the_way(self) -> bool:
        """Give up before recording where somebody else's profiler records: going on would end theirs, or the process.

        Ours is dropped, not stopped: to stop one that has warmed up starts it first.
        """
        import torch
        from torch.profiler import ProfilerAction

        recording = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        is_ours = self._profiler is not None and self._profiler.current_action in recording
        if is_ours or not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return False
        logger.warning("ProfilerCallback profiles nothing: another profiler records in this process")
        self._profiler, self._is_over = None, True
        _active.discard(self)
        return True

    def _export(self, profiler: Any, rank: int) -> None:
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
        if not _write_trace(profiler, path):
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
        if self._step_mark is not None:
            mark, self._step_mark = self._step_mark, None
            mark.__exit__(None, None, None)

    def _close(self) -> None:
        """Stop the profiler; one that was recording exports what it has."""
        self._end_step()
        if self._profiler is not None and not self._is_in_the_way():
            profiler, self._profiler = self._profiler, None
            profiler.stop()
        _active.discard(self)


def rank_of(state: Any) -> int:
    """This process's rank; a state that does not have it is of a run that torchrun's environment describes."""
    return int(getattr(state, "rank", os.environ.get("RANK") or 0))


def _write_trace(profiler: Any, path: Path) -> bool:
    """Write a trace, and tell whether it is there as a whole: the profiler itself does not say."""
    why = "it is not complete; is the disk full?"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed since training began
        path.unlink(missing_ok=True)  # so that an earlier one is not taken for this one
        profiler.export_chrome_trace(str(path))
        if _ends_as_json(path):
            return True
    except (OSError, RuntimeError) as error:
        why = str(error)
    logger.warning("the trace %s could not be written: %s", path, why)
    return False


def _ends_as_json(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")


def _window(start: int, length: int, steps_left: int | None) -> range:
    """The steps to record: those asked for, else as many before the end as there are."""
    if steps_left is not None and start + length > steps_left:
        start = max(0, min(start, steps_left - length))
        length = min(length, max(0, steps_left))
    return range(start, start + length)
