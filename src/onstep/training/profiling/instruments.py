"""Features that measure a run: timers, ranges, energy and profilers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from onstep.errors import warn_once
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption, is_due, within
from onstep.training.profiling.profilers import (
    NsysContext,
    handle_profiling_step,
    handle_profiling_stop,
    initialize_pytorch_profiler,
    should_profile_rank,
    start_nsys_profiler,
    stop_nsys_profiler,
)
from onstep.training.reporting.gpu_telemetry import EnergyMonitor
from onstep.training.reporting.timers import INTERVAL_TIME
from onstep.training.run import Run
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class DeviceSync(Feature[Job]):
    """Waits for the device every so many steps; on the CPU it does nothing."""

    name = "device_sync"
    when = "train.train_sync_interval"

    def after_iteration(self, step: Step) -> None:
        if is_due(step.number, self.host.run.cfg.train.train_sync_interval) and torch.cuda.is_available():
            torch.cuda.synchronize()


class StepTimers(Feature[Job]):
    """Times the parts of every step, as selected by `logger.timing_log_level`."""

    name = "timers"
    when = "logger.timing_log_level"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return host.run.cfg.logger.timing_log_level > 0

    def wrap_read(self, read: Callable[P, T]) -> Callable[P, T]:
        return self._timed("batch-generator", read)

    def wrap_compute(self, compute: Callable[P, T]) -> Callable[P, T]:
        return self._timed("forward-backward", compute)

    def wrap_forward(self, forward: Callable[P, T]) -> Callable[P, T]:
        return self._timed("forward-compute", forward)

    def wrap_backward(self, backward: Callable[P, T]) -> Callable[P, T]:
        return self._timed("backward-compute", backward)

    def wrap_update(self, update: Callable[P, T]) -> Callable[P, T]:
        return self._timed("optimizer", update)

    def _timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        timers = self.host.run.timers
        return within(lambda: timers(name), function) if name in timers.names() else function


class IntervalTime(Feature[Job]):
    """Measures the time of the steps of a logging interval, without evaluations and saves."""

    name = "interval_time"

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.host.run.timers(INTERVAL_TIME).reset()

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        run = self.host.run
        if work not in ("evaluate", "save", "wait"):
            yield
            return
        timer = run.timers(INTERVAL_TIME)
        was_running = timer.is_running
        if was_running:
            timer.stop()
        started = run.clock.elapsed()
        try:
            yield
        finally:
            run.interval.start += run.clock.elapsed() - started
            if was_running:
                timer.start()


class NvtxRanges(Feature[Job]):
    """Names the parts of a step for Nsight Systems."""

    name = "nvtx_ranges"
    when = "profiling.nvtx_ranges"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether ranges are configured and possible; if not possible, this is logged once."""
        if not host.run.cfg.profiling.nvtx_ranges:
            return False
        possible = host.run.world.device.type == "cuda" and torch.cuda.is_available()
        if not possible:
            warn_once(logger, "profiling.nvtx_ranges does nothing: this run does not use a CUDA GPU; set it to false")
        return possible

    def wrap_iterate(self, iterate: Callable[P, T]) -> Callable[P, T]:
        """`training_step_<number of the step before>`"""
        progress = self.host.run.train_state
        return within(lambda: torch.cuda.nvtx.range(f"training_step_{progress.step}"), iterate)

    def wrap_compute(self, compute: Callable[P, T]) -> Callable[P, T]:
        return within(lambda: torch.cuda.nvtx.range("forward-backward"), compute)

    def wrap_update(self, update: Callable[P, T]) -> Callable[P, T]:
        return within(lambda: torch.cuda.nvtx.range("optimizer"), update)


@dataclass
class GivenMonitor:
    """Holds a monitor that a caller installed instead of the run's own."""

    monitor: EnergyMonitor | None = None


def energy_monitor(run: Run) -> EnergyMonitor | None:
    """The monitor of a run, created on first use; None without one, unless `logger.log_energy` requires it."""
    given = run.features.room(GivenMonitor)
    if given.monitor is None and run.cfg.logger.log_energy:
        given.monitor = EnergyMonitor(run.world)
    return given.monitor


class Energy(Feature[Job]):
    """Measures the energy that the GPUs use for the steps."""

    name = "energy"
    when = "logger.log_energy"
    collective = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return energy_monitor(host.run) is not None

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self.monitor = energy_monitor(host.run) or EnergyMonitor(host.run.world)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Measure; if training ends without an error, rank 0 prints its energy. Collective."""
        monitor = self.monitor
        if monitor.setup():
            monitor.resume()
        yield
        if monitor.is_available:
            monitor.lap()
            if self.host.run.world.is_main:
                print(f"Total training energy (GPU): {monitor.get_total() / 1e6} MJ", flush=True)  # noqa: T201

    def restart_interval(self) -> None:
        self.monitor.restart()

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        counts = work not in ("evaluate", "save", "wait")
        if not counts:
            self.monitor.pause()
        try:
            yield
        finally:
            if not counts:
                self.monitor.resume()


class Profilers(Feature[Job]):
    """Runs torch's profiler and Nsight Systems over a window of steps."""

    name = "profilers"
    when = "profiling.use_pytorch_profiler, profiling.use_nsys_profiler, on profiling.profile_ranks"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        profiling = host.run.cfg.profiling
        profiles = profiling.use_pytorch_profiler or profiling.use_nsys_profiler
        return profiles and should_profile_rank(profiling, host.run.world.rank)

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._config, self._run = host.run.cfg.profiling, host.run
        self._trace = initialize_pytorch_profiler(host.run)
        self._nsys: NsysContext | None = None
        """The context of Nsight Systems while it profiles."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """End the profiles, whatever happens; recorded data is written."""
        try:
            yield
        finally:
            if self._trace is not None:
                self._trace.stop()
            self._stop_nsys()

    def begin(self) -> None:
        """Continue a profile if the process starts within its window."""
        config, step = self._config, self._run.train_state.step
        if config.use_nsys_profiler and config.profile_step_start < step < config.profile_step_end:
            self._nsys = start_nsys_profiler(config)

    def before_iteration(self) -> None:
        step = self._run.train_state.step
        if step >= self._config.profile_step_end:  # the last step of the profile was skipped
            self._stop_nsys()
        started = handle_profiling_step(self._config, step, self._run.world.rank, self._trace)
        self._nsys = self._nsys if started is None else started

    def after_iteration(self, step: Step) -> None:
        number = self._run.train_state.step
        handle_profiling_stop(self._config, number, self._run.world.rank, self._trace, self._nsys)
        if number == self._config.profile_step_end:
            self._nsys = None

    def _stop_nsys(self) -> None:
        context, self._nsys = self._nsys, None
        if context is not None:
            stop_nsys_profiler(context)
