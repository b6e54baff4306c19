"""Columns of numbers from records, in memory that grows with the number of values, whatever keys the records have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onstep.errors import DataError
from onstep.record import Record

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.int64]

MAX_KEYS = 10_000
"""Maximum number of different keys with a column."""
MAX_CELLS = 50_000_000
_CELLS_PER_VALUE = 50
_CACHE_BYTES = 256 << 20
_FEWEST_CACHED = 8
_RARE = 16
"""Records whose keys fewer records of a block have are taken value by value."""


class _Part(NamedTuple):
    """A key in some records of a block."""

    rows: Rows
    numbers: Numbers | None
    """None if no value is a number."""


class Columns:
    """The numbers of records by key. Records are added in blocks, in order.

    Attributes:
        num_records: number of records added.
        num_values: number of their values.
        has_more_keys: whether there were more than `MAX_KEYS` different keys; those that appeared last have no column.
    """

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.num_records = self.num_values = 0
        self.has_more_keys = False
        self._parts: dict[str, list[_Part]] = {}
        self._columns: dict[str, Numbers] = {}
        self._masks: dict[str, Mask] = {}
        self.add(records)

    def add(self, records: Sequence[Record]) -> None:
        """Add a block of records."""
        layouts: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, keys in enumerate(map(tuple, records)):
            layouts[keys].append(row)
        rare: dict[str, tuple[list[int], list[Any]]] = defaultdict(lambda: ([], []))
        for keys, chosen in layouts.items():
            self._add_keys(keys)
            if len(chosen) < _RARE:
                for row in chosen:
                    for key, value in records[row].items():
                        rows, values = rare[key]
                        rows.append(row)
                        values.append(value)
                continue
            shared = np.array(chosen) + self.num_records
            for key, column in zip(keys, zip(*(records[row].values() for row in chosen), strict=True), strict=True):
                self._append(key, shared, column)
        for key, (rows, values) in rare.items():
            self._append(key, np.array(rows) + self.num_records, values)
        self.num_records += len(records)

    def keys(self) -> list[str]:
        """All keys that have a column, in order of first appearance."""
        return list(self._parts)

    def has_finite(self, key: str) -> bool:
        """Whether the key has a finite number in some record."""
        found = (part.numbers for part in self._parts.get(key, []) if part.numbers is not None)
        return any(np.isfinite(numbers).any() for numbers in found)

    def points(self, key: str) -> tuple[Rows, Numbers]:
        """The records that have the key, in order, and their numbers, NaN where there is none: two equal shapes."""
        parts = self._parts.get(key, [])
        rows = np.concatenate([np.empty(0, np.int64), *(part.rows for part in parts)])
        order = np.argsort(rows, kind="stable")
        nothing = (np.full(len(part.rows), np.nan) if part.numbers is None else part.numbers for part in parts)
        return rows[order], np.concatenate([np.empty(0), *nothing])[order]

    def has(self, key: str) -> Mask:
        """Which records have the key, shape (num_records,), read-only."""
        if key not in self._masks:
            mask = np.zeros(self.num_records, bool)
            for part in self._parts.get(key, []):
                mask[part.rows] = True
            _keep(self._masks, key, mask)
        return self._masks[key]

    def column(self, key: str) -> Numbers:
        """The numbers of the key, shape (num_records,), read-only; NaN where there is none."""
        if key not in self._columns:
            column = np.full(self.num_records, np.nan)
            for part in self._parts.get(key, []):
                if part.numbers is not None:
                    column[part.rows] = part.numbers
            _keep(self._columns, key, column)
        return self._columns[key]

    def _add_keys(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key not in self._parts:
                if len(self._parts) < MAX_KEYS:
                    self._parts[key] = []
                else:
                    self.has_more_keys = True

    def _append(self, key: str, rows: Rows, values: Sequence[Any]) -> None:
        if key in self._parts:
            self.num_values += len(rows)
            numbers = _numbers(values)
            self._parts[key].append(_Part(rows, None if np.isnan(numbers).all() else numbers))

    def check_table(self, what: str) -> None:
        """Check that a table with a row per record and a column per key is not almost empty and huge.

        Raises:
            DataError: if it is; `what` names it in the message.
        """
        num_columns = len(self._parts)
        num_cells = self.num_records * num_columns
        if num_cells > MAX_CELLS and self.num_values * _CELLS_PER_VALUE < num_cells:
            raise DataError(
                f"{what} would have {self.num_records:,} rows and {num_columns:,} columns, but only "
                f"{self.num_values:,} values; tables of more than {MAX_CELLS:,} cells must have a value in one of "
                f"{_CELLS_PER_VALUE}. The keys of the records differ too much for a table: read them one by one with "
                "TrainingLog.records, or replay the log to tensorboard."
            )


def _keep(cache: dict[str, Any], key: str, array: NDArray[Any]) -> None:
    """Add a read-only array to a cache, and drop the oldest ones if it grows too large."""
    array.flags.writeable = False
    cache[key] = array
    while len(cache) > max(_FEWEST_CACHED, _CACHE_BYTES // max(1, array.nbytes)):
        del cache[next(iter(cache))]


def number(value: Any) -> float:
    """Convert a number to a float, infinite on overflow; NaN for anything else, including true and false."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _numbers(values: Sequence[Any]) -> Numbers:
    if {*map(type, values)} <= {float, int}:
        with suppress(OverflowError):  # an integer too large for a float
            return np.array(values, float)
    return np.fromiter(map(number, values), float, len(values))
