"""Converts the records of a run to points for trackers: numbers only, each metric once per step."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, prod
from typing import Any

from onstep.files.bounded_reading import brief
from onstep.trackers.metric_names import tracker_names
from onstep.trackers.tracker import Point

logger: logging.Logger = logging.getLogger(__name__)

SETTLING_SECONDS = 2.0
"""After this time, a tracker has written the points it received; W&B, Trackio and MLflow need up to a second."""


_POINT_FIELDS = {"metrics", "step", "timestamp"}
_LARGEST = int(sys.float_info.max)


class RecentPoints:
    """The newest points of a run, for checkpoints; includes every point that a tracker might lose in a kill.

    It grows until `forget` is called with the number of points still waiting for the tracker.
    """

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self._points = list(points)

    @property
    def last(self) -> tuple[Point, ...]:
        """The points of the last step."""
        return tuple(point for point in self._points if point.step == self.last_step)

    @property
    def last_step(self) -> int:
        """Step of the last point; -1 if there is none."""
        return self._points[-1].step if self._points else -1

    @property
    def kept(self) -> tuple[Point, ...]:
        """All points kept: after a resume, those of the checkpoint."""
        return tuple(self._points)

    def add(self, point: Point) -> None:
        """Append a point."""
        self._points.append(point)

    def unsettled(self, num_waiting: int = 0) -> tuple[Point, ...]:
        """The points that a tracker might lose in a kill, always complete steps.

        Includes those of the last step, those of the seconds before it, and points still queued regardless of age.
        """
        return tuple(self._points[self._num_settled(num_waiting) :])

    def forget(self, num_waiting: int) -> None:
        """Drop the points that are settled; see `unsettled`."""
        del self._points[: self._num_settled(num_waiting)]

    def _num_settled(self, num_waiting: int) -> int:
        points = self._points
        if not points:
            return 0
        young = points[-1].timestamp - SETTLING_SECONDS
        first = bisect_left(points, young, key=lambda point: point.timestamp)
        first = max(min(first, len(points) - num_waiting), 0)
        while first > 0 and points[first - 1].step == points[first].step:
            first -= 1
        return first


class RunPoints:
    """Converts reported records to points, one by one.

    Args:
        state: `state_dict()` of the checkpoint that is resumed.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        step = state.get("step", -1)
        self._step: int = step if is_step(step) else -1
        self._shown = saved_mapping(state, "values", "the checkpoint's record of what trackers show")

    def add(self, metrics: Mapping[str, Any], step: int, timestamp: float) -> tuple[Point, Point]:
        """The point of a record under the metrics log's names, and under the names shown in trackers.

        The latter omits metrics that the trackers already received at this step, which final metrics and evaluations
        repeat; it may be empty.
        """
        point = Point(numbers_of(metrics), step, timestamp)
        shown = tracker_names(point.metrics)
        if step != self._step:
            self._step, self._shown = step, dict(shown)
        else:
            shown = {name: one for name, one in shown.items() if not self._is_shown(name, one)}
            self._shown.update(shown)
        return point, Point(shown, step, timestamp)

    def state_dict(self) -> dict[str, Any]:
        """The metrics already shown for the last step, excluding those still on a device."""
        return {"step": self._step, "values": {key: one for key, one in self._shown.items() if _is_plain(one)}}

    def _is_shown(self, name: str, value: Any) -> bool:
        before = self._shown.get(name)
        if not _is_plain(value) or not _is_plain(before):
            return False
        return bool(value == before or (value != value and before != before))


def saved_mapping(state: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """A dictionary in a checkpoint's state; anything else is ignored, with a warning: {}."""
    value = state.get(key, {})
    if isinstance(value, Mapping):
        return dict(value)
    logger.warning("%s is ignored: its %s is %s, which must be a dictionary", where, key, brief(value))
    return {}


def saved_points(values: Any, where: str) -> list[Point]:
    """The points in a checkpoint's state; what is not a point is left out, with a warning."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        logger.warning("%s is ignored: its points are %s, which must be a list", where, brief(values))
        return []
    wrong = [one for one in values if not _is_point(one)]
    if wrong:
        logger.warning(
            "%s: %d of its %d points are left out, such as %s; a point must have exactly metrics (numbers "
            "within the range of floats), step (an integer from 0 to 2**63 - 1) and timestamp (seconds)",
            where,
            len(wrong),
            len(values),
            brief(wrong[0], 100),
        )
    return [Point(**one) for one in values if _is_point(one)]


def is_step(value: Any) -> bool:
    """Whether a value can be a step: an integer from 0 to 2**63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_point(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.keys() != _POINT_FIELDS or not is_step(value["step"]):
        return False
    metrics, timestamp = value["metrics"], value["timestamp"]
    is_named = isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics)
    return is_named and all(map(_fits_float, metrics.values())) and _fits_float(timestamp) and isfinite(timestamp)


def _fits_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)


def plain_point(point: Point) -> dict[str, Any]:
    """A point as plain values for a checkpoint, the arguments of `Point`; reads values that are still on a device."""
    metrics = {name: plain_number(one) for name, one in point.metrics.items()}
    return {"metrics": metrics, "step": point.step, "timestamp": point.timestamp}


def points_for(keeps_names: bool, points: Iterable[Point]) -> tuple[Point, ...]:
    """Convert points with the metrics log's names to those that a tracker gets."""
    run_points = RunPoints()
    pairs = [run_points.add(point.metrics, point.step, point.timestamp) for point in points]
    return tuple(pair[0] if keeps_names else pair[1] for pair in pairs)


def plain_number(value: Any) -> int | float:
    """Convert to a built-in int or float, from subclasses (`np.float64`) and from tensors on a device too.

    An integer beyond the range of floats becomes infinite.
    """
    if not isinstance(value, int):
        return float(value)
    return int(value) if abs(value) <= _LARGEST else inf if value > 0 else -inf


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float))


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a record; the maximum of a list (one entry per rank); 0-d tensors are kept unread."""
    found = {}
    for name, value in metrics.items():
        number = value if type(value) is float else _number(value)
        if number is not None:
            found[name] = number
    return found


def read_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers; reads values that are still on a device."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = plain_number(value)
        except (TypeError, ValueError):
            continue
    return numbers


def is_number(value: Any) -> bool:
    """Whether a value can be a point: a number, or a tensor with one element, which is not read."""
    return isinstance(value, (int, float)) or (hasattr(value, "__float__") and prod(getattr(value, "shape", ())) == 1)


def _number(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return plain_number(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        numbers = [one for one in map(_number, value) if one is not None]
        return max(numbers) if numbers else None
    is_scalar = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    return value if is_scalar else None
