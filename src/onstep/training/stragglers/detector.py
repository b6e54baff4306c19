"""Measures, on each rank, the time that a step spends on data and in the forward pass, and compares the ranks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

import torch

from onstep.config import StragglerDetectionConfig
from onstep.distributed import World
from onstep.events import Request
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption, within
from onstep.training.reporting.gpu_telemetry import open_gpu_telemetry
from onstep.training.run import Run
from onstep.training.stages.agreement import current_value, write_decision
from onstep.training.stages.job import Job
from onstep.training.stages.step_flops import flops_of_samples
from onstep.training.stragglers.rank_times import RankTimes, Straggler, find_stragglers, ranking_lines, straggler_line

logger = logging.getLogger(__name__)

Given = ParamSpec("Given")
Found = TypeVar("Found")
Mark = TypeVar("Mark")


class _Section(Generic[Mark]):
    """Sums the seconds between entering and exiting, computed only when the sum is requested."""

    def __init__(self, mark: Callable[[], Mark], seconds_between: Callable[[Mark, Mark], float]) -> None:
        self._mark, self._seconds_between = mark, seconds_between
        self._begun: Mark | None = None
        self.pairs: list[tuple[Mark, Mark]] = []
        """Pairs of marks at the beginning and the end of each interval."""

    def __enter__(self) -> None:
        self._begun = self._mark()

    def __exit__(self, *exception: object) -> None:
        if self._begun is not None:
            self.pairs.append((self._begun, self._mark()))
            self._begun = None

    def seconds(self) -> float:
        return math.fsum(self._seconds_between(begun, ended) for begun, ended in self.pairs)


def _seconds_on_host(begun: float, ended: float) -> float:
    return ended - begun


def _device_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_on_device(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    """The seconds between two events; waits for the device."""
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000


class StragglerDetector:
    """Identifies the rank that slows the others down, and whether its data or its computation is the cause.

    Use `with timer(bdata=True)` around the reading of a batch, and `with timer` around the forward pass; both cost two
    clock readings, on CUDA two recorded events. Nothing waits for the device before `report`.

    Args:
        options: thresholds and actions.
        world: the ranks.
        clock: seconds on a monotonic clock.
        on_found: called with the findings of `report`, identically on every rank.
    """

    def __init__(
        self,
        options: StragglerDetectionConfig,
        world: World | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_found: Callable[[list[Straggler]], None] | None = None,
    ) -> None:
        self._options, self._world, self._clock, self._on_found = options, world or World(), clock, on_found
        self._data = _Section(clock, _seconds_on_host)
        self._forward: _Section[float] | _Section[torch.cuda.Event] = _Section(clock, _seconds_on_host)
        self._telemetry = None
        if self._world.device.type == "cuda":
            self._forward = _Section(_device_mark, _seconds_on_device)
            self._telemetry = open_gpu_telemetry(self._world.device)
        self.enabled = not options.disable_straggler_on_startup
        """Whether to measure; changed between two reports, on all ranks alike."""
        self.stragglers: tuple[Straggler, ...] = ()
        """The findings of the last report."""
        self._since = clock()

    def __call__(self, bdata: bool = False) -> _Section[float] | _Section[torch.cuda.Event] | StragglerDetector:
        """The context manager for the reading of a batch (`bdata`), or for the forward pass."""
        if not self.enabled:
            return self
        return self._data if bdata else self._forward

    def __enter__(self) -> StragglerDetector:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin a forward pass."""
        if self.enabled:
            self._forward.__enter__()

    def stop(self) -> None:
        """End a forward pass; do nothing if none was begun."""
        self._forward.__exit__()

    def leave_out(self, seconds: float) -> None:
        """Subtract an evaluation or a save from the time of the steps."""
        self._since += seconds

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Compare the ranks over the steps since the last report, print it on rank 0, and restart. Collective.

        Args:
            total_flops: model FLOPs of all ranks over these steps; 0 omits TFLOP/s.
            log_interval: number of steps, if it is not known from the readings of batches.

        Returns:
            Whether a rank is slow; the same on all ranks.
        """
        if not self.enabled:
            return False
        steps = max(len(self._data.pairs) or log_interval, 1)
        times = [RankTimes(*row) for row in self._world.gather_numbers(list(astuple(self._times(steps))))]
        self.restart()
        if self._world.is_main:
            lines = [straggler_line(times, total_flops / steps)]
            lines += ranking_lines(times, self._options.straggler_minmax_count)
            print("\n".join(lines), flush=True)  # noqa: T201 - the report is what was asked for
        found = find_stragglers(times, self._options.threshold) if self._world.size > 1 else []
        self.stragglers = tuple(found)
        if found and self._on_found is not None:
            self._on_found(found)
        return bool(found)

    def _times(self, steps: int) -> RankTimes:
        gpu = self._telemetry
        readings = (gpu.watts(), gpu.celsius(), gpu.utilization(), gpu.megahertz()) if gpu else ()
        parts = (self._clock() - self._since, self._data.seconds(), self._forward.seconds())
        return RankTimes(*(part / steps for part in parts), *readings)

    def restart(self) -> None:
        """Discard the measurements, and measure from here on."""
        self._data.pairs.clear()
        self._forward.pairs.clear()
        self._since = self._clock()


@dataclass
class _Room:
    detector: StragglerDetector | None = None


def detector_of(run: Run) -> StragglerDetector:
    """The detector of a run, created on first use."""
    room = run.features.room(_Room)
    room.detector = room.detector or StragglerDetector(
        run.cfg.straggler, run.world, lambda: run.clock.elapsed(), lambda found: act_on_stragglers(run, found)
    )
    return room.detector


class Stragglers(Feature[Job]):
    """Measures reading and forward passes of every step, and compares the ranks at logged steps."""

    name = "stragglers"
    when = "straggler.log_straggler"
    collective = True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._run = host.run
        self.detector = detector_of(host.run)
        self._flops = 0.0

    def restart_interval(self) -> None:
        """Measure from here on, unless that was turned off while the run ran (`log_straggler` of the control)."""
        self.detector.enabled = bool(current_value(self._run, "log_straggler"))
        self.detector.restart()

    def wrap_read(self, read: Callable[Given, Found]) -> Callable[Given, Found]:
        return within(lambda: self.detector(bdata=True), read)

    def wrap_forward(self, forward: Callable[Given, Found]) -> Callable[Given, Found]:
        return within(self.detector, forward)

    def after_iteration(self, step: Step) -> None:
        """Compare the ranks at a logged step, which is collective."""
        job, run = self.host, self._run
        self._flops += flops_of_samples(run.cfg, job.model, job.samples_of(step.batches))
        log_interval = run.cfg.logger.log_interval
        if log_interval and run.train_state.step % log_interval == 0:
            self.detector.report(self._flops, log_interval)
            self._flops = 0.0
            self.restart_interval()

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        started = self._run.clock.elapsed()
        try:
            yield
        finally:
            if work in ("evaluate", "save", "wait"):
                self.detector.leave_out(self._run.clock.elapsed() - started)


def act_on_stragglers(state: Run, found: list[Straggler]) -> None:
    """Warn on rank 0, record the findings among the run's decisions, and request a stop if configured."""
    texts = [one.described(state.world.place(one.rank)) for one in found]
    text = "; ".join(texts)
    if state.world.is_main:
        logger.warning("STRAGGLER DETECTION WARNING: %s", text)
    for one, reason in zip(found, texts, strict=True):
        write_decision(state, Request("straggler", "straggler detection", "", reason, one.rank, vars(one)))
    if state.cfg.straggler.stop_if_detected:
        state.exits.straggler = text
