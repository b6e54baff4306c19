"""Defines `TrackerLogger`, which logs to one tracker of a run and holds the state needed to resume it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from onstep.trackers.points import RecentPoints, is_number, plain_point, saved_mapping, saved_points
from onstep.trackers.tag_record import VS_SAMPLES
from onstep.trackers.tracker import Point, RunIdentity
from onstep.trackers.tracker_queue import TrackerQueue

CLOSE_TIMEOUT = 30.0
"""Seconds that the end of a run waits for all trackers together."""

SAMPLES_DIR = "vs_samples"
"""Subdirectory of TensorBoard's directory for curves over samples. Resuming masks points beyond a position on the x
axis, so curves with different axes cannot share a directory."""


class TrackerLogger:
    """A tracker of a run. No method blocks, and none raises because of the tracker's faults.

    Args:
        queue: the queue of the tracker.
        clock: returns Unix seconds.
        over_samples: the queue for Megatron Bridge's curves over consumed samples; only TensorBoard has this second
            run.
    """

    def __init__(
        self, queue: TrackerQueue, clock: Callable[[], float] = time.time, over_samples: TrackerQueue | None = None
    ) -> None:
        self.queue = queue
        self.over_samples = None if over_samples is None else TrackerLogger(over_samples, clock)
        self.recent = RecentPoints()
        """The newest points, under the tracker's names."""
        self._clock = clock

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a point to each curve, by default at the step of the last point.

        Tensors with one element are read by the queue's thread.
        """
        self.add(metrics, max(self.recent.last_step, 0) if step is None else step, self._clock())

    def log_metric(self, name: str, value: Any, step: int | None = None) -> None:
        """Add a point to a curve."""
        self.log_metrics({name: value}, step)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """W&B's name for `log_metrics`; values that are not numbers are shown by a tracker with `media`."""
        media = {name: value for name, value in metrics.items() if not is_number(value)}
        if numbers := {name: value for name, value in metrics.items() if name not in media}:
            self.log_metrics(numbers, step)
        if media:
            self.queue.media(media, max(self.recent.last_step, 0) if step is None else step)

    def add_text(self, tag: str, text: str, step: int = 0) -> None:
        """Show a text."""
        self.queue.text(tag, text, step)

    def add(self, metrics: Mapping[str, Any], step: int, timestamp: float) -> None:
        """Add a point with a timestamp to each curve."""
        self.recent.add(Point(dict(metrics), step, timestamp))
        self.queue.log(metrics, step, timestamp)
        self.recent.forget(self.queue.num_waiting)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        """Add a point to a curve, as `SummaryWriter` does; a tag that ends in `vs samples` is plotted over samples."""
        logger = self.over_samples if tag.endswith(VS_SAMPLES) else None
        (logger or self).log_metrics({tag: scalar_value}, global_step)

    def add_tags(self, over_steps: Mapping[str, Any], over_samples: Mapping[str, Any], step: int, samples: int) -> None:
        """Add a point to each of Megatron Bridge's curves."""
        self.log_metrics(over_steps, step)
        if self.over_samples is not None and over_samples:
            self.over_samples.log_metrics(over_samples, samples)

    def open(self, run: RunIdentity, state: Mapping[str, Any], samples: int = 0) -> None:
        """Start or resume the run.

        Args:
            state: `state_dict()` of the checkpoint, {} for a new run.
            samples: samples trained on so far.
        """
        name = f"the checkpoint's state of the tracker {self.queue.tracker.name!r}"
        self.recent = RecentPoints(saved_points(state.get("last", []), name))
        self.queue.open(replace(run, last_points=self.recent.kept), saved_mapping(state, "sink", name))
        if self.over_samples is not None:
            over_samples = saved_mapping(state, SAMPLES_DIR, name)
            self.over_samples.open(replace(run, start_step=samples, config={}), over_samples)

    def state_dict(self) -> dict[str, Any]:
        """State to resume the run: the tracker's ids and the points it might lose in a kill. Reads the device."""
        points = self.recent.unsettled(self.queue.num_waiting)
        own = {"sink": self.queue.state_dict(), "last": [plain_point(point) for point in points]}
        return own if self.over_samples is None else {**own, SAMPLES_DIR: self.over_samples.state_dict()}

    def make_durable(self) -> None:
        """Fsync the tracker's local files; may be called from another thread."""
        for queue in self.queues:
            queue.make_durable()

    def settle(self) -> None:
        """Note that the tracker was closed, so only points of the last step are sent to it again."""
        self.recent = RecentPoints(self.recent.last)
        if self.over_samples is not None:
            self.over_samples.settle()

    def __getattr__(self, name: str) -> Any:
        """A method or attribute of the service itself, such as `add_histogram`, `run`, `config` or `log_artifact`.

        It is called in the caller's thread, and its faults are the caller's. Waits until the tracker's run is open.

        Raises:
            AttributeError: if the service has none of this name, or its run is not open.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.queue.client(), name)

    def flush(self) -> None:
        """Do nothing: the queue's thread sends points immediately. Exists for clients that call it."""

    @property
    def queues(self) -> list[TrackerQueue]:
        """All queues of the tracker."""
        return [self.queue, *([] if self.over_samples is None else self.over_samples.queues)]

    def close(self, status: str = "completed") -> None:
        """Send pending points, waiting at most `CLOSE_TIMEOUT`."""
        close_together([self], status)


def close_together(loggers: Iterable[TrackerLogger], status: str, timeout: float = CLOSE_TIMEOUT) -> None:
    """Close trackers in parallel, waiting at most `timeout` seconds for all of them together."""
    loggers = list(loggers)
    queues = [queue for logger in loggers for queue in logger.queues]
    deadline = time.monotonic() + timeout
    for queue in queues:
        queue.begin_close(status)
    for queue in queues:
        queue.finish_close(deadline - time.monotonic())
    for logger in loggers:
        logger.settle()
