"""Keeps the curves of a job in memory: columns of numbers, which other threads read without a lock."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, takewhile
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.log_tail import LogTail
from onstep.analysis.plots.smoothing import downsampled_rows
from onstep.errors import DataError, warn_once
from onstep.record import Record

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
_MOST_STEPS = 2**53
"""Steps from here on are not exact in JSON; the record is damaged."""
_AXES = frozenset({"step", "global_step", "timestamp", "epoch"})
"""Keys of a record that do not become curves."""


class Curve:
    """One series. Written by one thread; `rows` may be called by any."""

    def __init__(self) -> None:
        # A reader reads the pair at once. What is before the length in a buffer is never changed.
        self._filled: tuple[NDArray[np.float64], int] = (np.empty((3, 64)), 0)

    def add(self, step: int, timestamp: float, value: float) -> None:
        """Append a point; one at an earlier step than the last replaces what followed, as after a rollback."""
        buffer, length = self._filled
        if length and step < buffer[_STEP, length - 1]:
            length = int(np.searchsorted(buffer[_STEP, :length], step))
            buffer = buffer.copy()
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

    def rows(self) -> NDArray[np.float64]:
        """Steps, values and times so far, shape (3, num_points); not a copy."""
        buffer, length = self._filled
        return buffer[:, :length]


class History:
    """The curves of a job by name. Any thread reads.

    A value that is a list of numbers, one per rank, is kept as `name[0]`, `name[1]`, ... NaN and infinities are gaps.

    Args:
        log: a log that is read as it grows, whenever `refresh` is called; None: one thread adds the records.
        before: the records of steps that precede those of the log.
    """

    def __init__(self, log: Path | None = None, before: Sequence[Record] = ()) -> None:
        self.is_read_from_log = log is not None
        self._log = log
        self._before = before
        self._tail: LogTail | None = None
        self._refreshing = threading.Lock()
        self._curves: dict[str, Curve] = {}
        """Of records."""
        self._own_curves: dict[str, Curve] = {}

    def refresh(self) -> None:
        """Read what the log has by now; one that was cut back or replaced is read from its start."""
        if self._log is None:
            return
        with self._refreshing:
            try:
                self._read_on(self._log)
            except (OSError, DataError):  # it is not there yet, not readable, or was cut back while it was read
                self._tail = None

    def begin_again(self, records: Sequence[Record]) -> None:
        """Replace all records by others."""
        fresh, first = History(), _step_of(records[0]) if records else None
        earlier = takewhile(lambda one: first is None or (_step_of(one) or 0) < first, self._before)
        for record in chain(earlier, records):
            fresh.add_record(record)
        self._curves = fresh._curves

    def _read_on(self, log: Path) -> None:
        is_new, self._tail = self._tail is None, self._tail or LogTail(log)
        records = [] if is_new else self._tail.news()
        if is_new or self._tail.was_rewritten:
            self.begin_again(self._tail.read())
            return
        for record in records:
            self.add_record(record)

    def add_record(self, record: Record) -> None:
        """Add a point to the curve of each number in a record, if the record has a step."""
        step = _step_of(record)
        if step is not None:
            _add_to(self._curves, step, time_of(record), {key: record[key] for key in record if key not in _AXES})

    def add(self, step: int, timestamp: float, values: Mapping[str, Any]) -> None:
        """Add a point to the curve of each number in `values`, which no record has; other values are ignored."""
        _add_to(self._own_curves, step, timestamp, values)

    def names(self) -> list[str]:
        """The names of all curves, in the order in which they appeared."""
        return list(self._all())

    def num_points(self) -> int:
        """Points of the longest curve."""
        return max((curve.rows().shape[1] for curve in self._all().values()), default=0)

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
        curves = self._all()
        chosen = curves if names is None else [name for name in names if name in curves]
        return {name: _as_lists(curves[name].rows(), max(points, 10), since_step) for name in chosen}

    def _all(self) -> dict[str, Curve]:
        return {**self._curves, **self._own_curves}


def _add_to(curves: dict[str, Curve], step: int, timestamp: float, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if type(value) is float or _is_number(value):
            _add_point(curves, name, step, timestamp, value)
        elif isinstance(value, (list, tuple)) and all(map(_is_number, value)):
            for index, one in enumerate(value[:MOST_RANKS]):
                _add_point(curves, f"{name}[{index}]", step, timestamp, one)


def _add_point(curves: dict[str, Curve], name: str, step: int, timestamp: float, value: Any) -> None:
    curve = curves.get(name)
    if curve is None:
        if len(curves) >= MOST_SERIES:
            warn_once(logger, f"The control server keeps {MOST_SERIES} curves; {name} and further ones are left out.")
            return
        curve = curves[name] = Curve()
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of a float
        number = math.nan
    curve.add(step, timestamp, number if math.isfinite(number) else math.nan)


def finite_number(value: Any) -> float | None:
    """The value, if it is a number that a float can hold and not NaN or infinite; else None."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of a float
        return None


def time_of(record: Record) -> float:
    """When a record was written, in Unix seconds; now, if it does not say."""
    timestamp = finite_number(record.get("timestamp"))
    return time.time() if timestamp is None else float(timestamp)


def _step_of(record: Record) -> int | None:
    step = finite_number(record.get("step", record.get("global_step")))
    return step if isinstance(step, int) and abs(step) < _MOST_STEPS else None


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
