"""Profiles a few steps with torch's profiler, or marks them for Nsight Systems."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ExecutionTraceObserver, ProfilerAction, profile

from onstep.config import ProfilingConfig
from onstep.errors import ConfigError, warn_once
from onstep.events import CallbackManager
from onstep.metrics.torch_profiler import SoleProfiler, write_trace
from onstep.training.run import Run

logger = logging.getLogger(__name__)

NsysContext = AbstractContextManager[object]
"""Names torch's operations for Nsight Systems."""


class Profiler(Protocol):
    """The interface of torch's profiler that the loop uses (`torch.profiler.profile` implements it)."""

    def step(self) -> None:
        """The next iteration begins."""

    def stop(self) -> None:
        """End the profile, and write what was recorded."""


def should_profile_rank(config: ProfilingConfig | None, rank: int) -> bool:
    """Whether a rank is profiled: one of `profile_ranks`, or any if that is empty; never without a configuration."""
    return config is not None and (not config.profile_ranks or rank in config.profile_ranks)


def check_profilers(config: ProfilingConfig, manager: CallbackManager | None) -> None:
    """Check that no callback profiles too: starting a second profiler ends the process.

    Raises:
        ConfigError: naming the callback.
    """
    if not config.use_pytorch_profiler or manager is None:
        return
    for callback in manager.callbacks:
        if getattr(callback, "is_profiler", False):
            raise ConfigError(
                f"profiling.use_pytorch_profiler=True and a {type(callback).__name__} both need torch's profiler, of "
                "which a process can have only one; remove one of them."
            )


def handle_profiling_step(
    config: ProfilingConfig | None, iteration: int, rank: int, pytorch_prof: Profiler | None
) -> NsysContext | None:
    """Begin an iteration for the profilers: torch's advances, nsys starts at `profile_step_start`.

    Args:
        config: which profiler, and when.
        iteration: number of steps done before this one.
        rank: this rank.
        pytorch_prof: torch's profiler, if any.

    Returns:
        The entered context of nsys, which `handle_profiling_stop` exits; else None.
    """
    if config is None or not should_profile_rank(config, rank):
        return None
    if config.use_pytorch_profiler and pytorch_prof is not None:
        pytorch_prof.step()
    if config.use_nsys_profiler and iteration == config.profile_step_start:
        return start_nsys_profiler(config)
    return None


def handle_profiling_stop(
    config: ProfilingConfig | None,
    iteration: int,
    rank: int,
    pytorch_prof: Profiler | None,
    nsys_nvtx_context: NsysContext | None = None,
) -> None:
    """End the profile after step `profile_step_end`, on ranks that have one.

    Args:
        config: which profiler, and when; None ends nothing.
        iteration: number of steps done.
        rank: this rank.
        pytorch_prof: torch's profiler, if any.
        nsys_nvtx_context: the return value of `handle_profiling_step` when nsys started.
    """
    if config is None or iteration != config.profile_step_end or not should_profile_rank(config, rank):
        return
    if config.use_pytorch_profiler and pytorch_prof is not None:
        pytorch_prof.stop()
    if config.use_nsys_profiler:
        stop_nsys_profiler(nsys_nvtx_context)


def start_nsys_profiler(config: ProfilingConfig) -> NsysContext | None:
    """Start `nsys profile -c cudaProfilerApi`; returns the entered context that names torch's operations for it.

    Without CUDA there is nothing to profile, which is logged once.
    """
    if not torch.cuda.is_available():
        warn_once(
            logger, "profiling.use_nsys_profiler does nothing: torch sees no CUDA GPU; use use_pytorch_profiler instead"
        )
        return None
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    context: NsysContext = torch.autograd.profiler.emit_nvtx(record_shapes=config.record_shapes)  # type: ignore[no-untyped-call]
    context.__enter__()
    return context


def stop_nsys_profiler(context: NsysContext | None) -> None:
    """Stop nsys, and exit the context that `start_nsys_profiler` returned."""
    if not torch.cuda.is_available():
        return
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    if context is not None:
        context.__exit__(None, None, None)


class TorchTrace:
    """Runs torch's profiler over the steps after `profile_step_start` up to `profile_step_end`, into one trace.

    It warms up in the step before. A run that resumes within these steps records the rest of them; one that ends within
    them, even with an exception, writes what was recorded. If another profiler is already recording, nothing is
    profiled and a warning is logged.

    Args:
        config: the steps, and what to record.
        path: the trace's file; `.gz` compresses it.
        get_step: returns the number of steps done.
        chakra_path: file of torch's execution trace, or None.
    """

    def __init__(
        self, config: ProfilingConfig, path: Path, get_step: Callable[[], int], chakra_path: Path | None = None
    ) -> None:
        self._config, self._path, self._get_step, self._chakra_path = config, path, get_step, chakra_path
        self._profiler: SoleProfiler | None = None
        self._observer: ExecutionTraceObserver | None = None
        self._is_over = False

    def step(self) -> None:
        """The next iteration begins."""
        step, config = self._get_step(), self._config
        if self._is_over or step < config.profile_step_start - 1:
            return
        if step >= config.profile_step_end:
            self.stop()
            return
        if self._profiler is None:
            self._profiler = self._started()
        else:
            self._profiler.step()
        if self._profiler is None or self._profiler.gave_way:
            self.stop()

    def stop(self) -> None:
        """End the profile, and write what was recorded; do nothing if it has not begun."""
        profiler, self._profiler = self._profiler, None
        self._is_over = True
        if profiler is not None:
            profiler.stop()
        if self._observer is not None:
            self._observer.unregister_callback()
            self._observer = None

    def _started(self) -> SoleProfiler | None:
        """The profiler; None if the directory for its trace cannot be created."""
        config = self._config
        for directory in [path.parent for path in (self._path, self._chakra_path) if path is not None]:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                logger.warning("nothing is profiled: cannot create the directory %s: %s", directory, error)
                return None
        if self._chakra_path is not None:
            self._observer = ExecutionTraceObserver().register_callback(str(self._chakra_path))
        made = profile(
            schedule=self._action,
            on_trace_ready=self._export,
            record_shapes=config.pytorch_profiler_collect_shapes,
            with_stack=config.pytorch_profiler_collect_callstack,
            execution_trace_observer=self._observer,
        )
        profiler = SoleProfiler(made, "profiling.use_pytorch_profiler")
        profiler.start()
        return profiler

    def _action(self, _: int) -> ProfilerAction:
        """Choose by the run's own step, which a skipped iteration advances too."""
        is_recorded = self._get_step() >= self._config.profile_step_start
        return ProfilerAction.RECORD if is_recorded else ProfilerAction.WARMUP

    def _export(self, profiler: profile) -> None:
        if write_trace(profiler, self._path):
            logger.info("wrote the profile %s", self._path)


def initialize_pytorch_profiler(state: Run) -> TorchTrace | None:
    """Torch's profiler of this rank, if it is configured and the profiled steps are still to come.

    Its files are `torch_profile/rank-<r>.json.gz` and `chakra/rank-<r>.json.gz`, next to `logger.tensorboard_dir`, else
    in the run's directory, else in `run.output_dir`.
    """
    config, rank = state.cfg.profiling, state.world.rank
    if not config.use_pytorch_profiler or not should_profile_rank(config, rank):
        return None
    if state.train_state.step >= config.profile_step_end:
        return None
    tensorboard = state.cfg.logger.tensorboard_dir
    if tensorboard is not None:
        directory = Path(tensorboard).absolute().parent
    else:
        directory = state.cfg.run.local_output_dir if state.run_dir is None else state.run_dir.path
    name = f"rank-{rank}.json.gz"
    chakra = directory / "chakra" / name if config.pytorch_profiler_collect_chakra else None
    return TorchTrace(config, directory / "torch_profile" / name, lambda: state.train_state.step, chakra)
