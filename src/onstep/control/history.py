"""Keeps the curves of a running job in memory: columns of numbers, which other threads read without a lock."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.plots.smoothing import downsampled_rows
from onstep.errors import warn_once

logger: logging.Logger = logging.getLogger(__name__)

MOST_SERIES = 2000
"""Further names are not kept: a name that contains a number, say, would fill the memory."""
MOST_RANKS = 1024
"""Elements of a list that are kept, one series each."""
MOST_POINTS = 50_000
"""Points of a curve; beyond, what there is is downsampled to half as many, as for a plot."""
_POINTS_PER_COLUMN = 5
"""What `downsampled_rows` keeps at most: first, last, lowest, highest, first gap."""
_STEP, _VALUE, _TIME = 0, 1, 2


class Curve:
    """One series. Written by one thread; `rows` may be called by any."""

    def __init__(self) -> None:
        # A reader reads the pair at once. What is before the length in a buffer is never changed.
        self._filled: tuple[NDArray[np.float64], int] = (np.empty((3, 64)), 0)

    def add(self, step: int, timestamp: float, value: float) -> None:
        """Append a point; one at an earlier step than the last replaces what followed, as after a rollback."""
        buffer, length = self._filled
        if length and step < buffer[_STEP, length - 1]:
            self.truncate(step - 1)
            buffer, length = self._filled
        if length == MOST_POINTS:
            kept = downsampled_rows(buffer[_STEP], buffer[_VALUE], MOST_POINTS // 2 // _POINTS_PER_COLUMN)
            length = len(kept)
            buffer = np.concatenate([buffer[:, kept], np.empty((3, MOST_POINTS - length))], axis=1)
        elif length == buffer.shape[1]:
            larger = np.empty((3, min(2 * length, MOST_POINTS)))
            larger[:, :length] = buffer
            buffer = larger
        buffer[_STEP, length] = step
        buffer[_VALUE, length] = value
        buffer[_TIME, length] = timestamp
        self._filled = (buffer, length + 1)

    def truncate(self, step: int) -> None:
        """Drop the points after a step."""
        rows = self.rows()
        length = int(np.searchsorted(rows[_STEP], step, side="right"))
        if length < rows.shape[1]:
            fresh = np.empty((3, min(max(64, 2 * length), MOST_POINTS)))
            fresh[:, :length] = rows[:, :length]
            self._filled = (fresh, length)

    def rows(self) -> NDArray[np.float64]:
        """Steps, values and times so far, shape (3, num_points); not a copy."""
        buffer, length = self._filled
        return buffer[:, :length]


class History:
    """The curves of a job by name. One thread adds, any thread reads.

    A value that is a list of numbers, one per rank, is kept as `name[0]`, `name[1]`, ... NaN and infinities are gaps.
    """

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}

    def add(self, step: int, timestamp: float, values: Mapping[str, Any]) -> None:
        """Add a point to the curve of each number in `values`; other values are ignored."""
        for name, value in values.items():
            if type(value) is float or _is_number(value):
                self._add(name, step, timestamp, value)
            elif isinstance(value, (list, tuple)) and all(map(_is_number, value)):
                for index, one in enumerate(value[:MOST_RANKS]):
                    self._add(f"{name}[{index}]", step, timestamp, one)

    def truncate(self, step: int) -> None:
        """Drop all points after a step."""
        for curve in self._curves.values():
            curve.truncate(step)

    def names(self) -> list[str]:
        """The names of all curves, in the order in which they appeared."""
        return list(self._curves)

    def num_points(self) -> int:
        """Points of the longest curve."""
        return max((curve.rows().shape[1] for curve in self._all()), default=0)

    def series(
        self, names: Iterable[str] | None = None, points: int = 1000, since_step: int | None = None
    ) -> dict[str, dict[str, list[Any]]]:
        """Curves for a plot, as JSON: `{"loss": {"step": [...], "value": [...], "time": [...]}}`.

        A long one is downsampled to at most `points` points, which include the lowest, the highest and the last, so
        no spike is lost. A gap is None.

        Args:
            names: the curves; unknown names are left out. None gives all.
            points: most points of a curve; at least 10.
            since_step: only points after this step.
        """
        chosen = self.names() if names is None else [name for name in names if name in self._curves]
        return {name: _as_lists(self._curves[name].rows(), max(points, 10), since_step) for name in chosen}

    def _add(self, name: str, step: int, timestamp: float, value: Any) -> None:
        curve = self._curves.get(name)
        if curve is None:
            if len(self._curves) >= MOST_SERIES:
                warn_once(
                    logger, f"The control server keeps {MOST_SERIES} curves; {name} and further ones are left out."
                )
                return
            curve = self._curves[name] = Curve()
        try:
            number = float(value)
        except OverflowError:  # an integer beyond the range of a float
            number = math.nan
        curve.add(step, timestamp, number if math.isfinite(number) else math.nan)

    def _all(self) -> list[Curve]:
        return list(self._curves.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _as_lists(rows: NDArray[np.float64], points: int, since_step: int | None) -> dict[str, list[Any]]:
    if since_step is not None:
        rows = rows[:, int(np.searchsorted(rows[_STEP], since_step, side="right")) :]
    if rows.shape[1] > points:
        kept = downsampled_rows(rows[_STEP], rows[_VALUE], points // _POINTS_PER_COLUMN)
        rows = rows[:, kept]
    values = rows[_VALUE].astype(object)
    values[np.isnan(rows[_VALUE])] = None
    return {"step": rows[_STEP].astype(np.int64).tolist(), "value": values.tolist(), "time": rows[_TIME].tolist()}
