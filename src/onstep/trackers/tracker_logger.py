"""One tracker of a run: what is logged to it, and what continues it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from onstep.trackers.points import RecentPoints, plain_point
from onstep.trackers.tag_record import VS_SAMPLES
from onstep.trackers.tracker import Point, RunIdentity
from onstep.trackers.tracker_queue import SinkQueue

CLOSE_TIMEOUT = 30.0
"""Seconds that the end of a run waits for all trackers together."""

SAMPLES_FOLDER = "vs_samples"
"""Where in TensorBoard's folder the curves over samples are: a curve is continued by masking what lies beyond a place
on its axis, so two axes cannot share a folder."""


class TrackerLogger:
    """A tracker of a run. No method blocks, and none raises for the tracker's faults.

    Args:
        queue: where points go.
        clock: unix seconds.
        over_samples: where Megatron Bridge's curves over consumed samples go; only TensorBoard has such a second run.
    """

    def __init__(
        self, queue: SinkQueue, clock: Callable[[], float] = time.time, over_samples: SinkQueue | None = None
    ) -> None:
        self.queue = queue
        self.over_samples = None if over_samples is None else TrackerLogger(over_samples, clock)
        self.recent = RecentPoints()
        """The newest points, under the names that the tracker got."""
        self._clock = clock

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a point to each curve, without a step at that of the last point.

        Tensors of one element are read by the queue's thread.
        """
        self.add(metrics, max(self.recent.last_step, 0) if step is None else step, self._clock())

    def log_metric(self, name: str, value: Any, step: int | None = None) -> None:
        """Add a point to a curve."""
        self.log_metrics({name: value}, step)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """W&B's name for `log_metrics`."""
        self.log_metrics(metrics, step)

    def add_text(self, tag: str, text: str, step: int = 0) -> None:
        """Show a text."""
        self.queue.text(tag, text, step)

    def add(self, metrics: Mapping[str, Any], step: int, timestamp: float) -> None:
        """Add a point of a moment to each curve."""
        self.recent.add(Point(dict(metrics), step, timestamp))
        self.queue.log(metrics, step, timestamp)
        self.recent.forget(self.queue.num_waiting)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        """Add a point to a curve, as a `SummaryWriter` does; one whose tag ends in `vs samples` is over samples."""
        logger = self.over_samples if tag.endswith(VS_SAMPLES) else None
        (logger or self).log_metrics({tag: scalar_value}, global_step)

    def add_tags(self, over_steps: Mapping[str, Any], over_samples: Mapping[str, Any], step: int, samples: int) -> None:
        """Add a point to each of Megatron Bridge's curves."""
        self.log_metrics(over_steps, step)
        if self.over_samples is not None and over_samples:
            self.over_samples.log_metrics(over_samples, samples)

    def open(self, run: RunIdentity, state: Mapping[str, Any], samples: int = 0) -> None:
        """Begin or continue the run.

        Args:
            state: `state_dict()` of the checkpoint, {} for a fresh run.
            samples: samples that are done.
        """
        self.recent = RecentPoints(Point(**one) for one in state.get("last", []))
        self.queue.open(replace(run, last_points=self.recent.kept), state.get("sink", {}))
        if self.over_samples is not None:
            self.over_samples.open(replace(run, start_step=samples, config={}), state.get(SAMPLES_FOLDER, {}))

    def state_dict(self) -> dict[str, Any]:
        """What continues the run: the tracker's ids and the points that a kill might take from it. Reads the device."""
        points = self.recent.unsettled(self.queue.num_waiting)
        own = {"sink": self.queue.state_dict(), "last": [plain_point(point) for point in points]}
        return own if self.over_samples is None else {**own, SAMPLES_FOLDER: self.over_samples.state_dict()}

    def settle(self) -> None:
        """The tracker was closed, so it has what it was given: no more than the last step is given to it again."""
        self.recent = RecentPoints(self.recent.last)
        if self.over_samples is not None:
            self.over_samples.settle()

    def flush(self) -> None:
        """For clients that call it; the queue's thread hands on what it gets at once."""

    @property
    def queues(self) -> list[SinkQueue]:
        """All queues of the tracker."""
        return [self.queue, *([] if self.over_samples is None else self.over_samples.queues)]

    def close(self, status: str = "completed") -> None:
        """Hand over what waits, for at most `CLOSE_TIMEOUT`."""
        close_together([self], status)


def close_together(loggers: Iterable[TrackerLogger], status: str, timeout: float = CLOSE_TIMEOUT) -> None:
    """Close trackers side by side: all of them together are waited for at most `timeout` seconds."""
    loggers = list(loggers)
    queues = [queue for logger in loggers for queue in logger.queues]
    deadline = time.monotonic() + timeout
    for queue in queues:
        queue.begin_close(status)
    for queue in queues:
        queue.finish_close(deadline - time.monotonic())
    for logger in loggers:
        logger.settle()
