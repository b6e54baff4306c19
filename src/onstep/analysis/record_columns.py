"""Records by column: the numbers under a key as one array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onstep.journal import Record

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Columns(Protocol):
    """What the columns of some records tell."""

    def keys(self) -> list[str]:
        """All keys, in the order in which they first appear."""

    def has(self, key: str) -> Mask:
        """Which records have the key, shape (num_records,), read-only."""

    def column(self, key: str) -> Numbers:
        """The numbers under the key, shape (num_records,), read-only; NaN where there is none."""

    def load(self, keys: Iterable[str]) -> None:
        """Make several columns ready at once."""

    def blocks(self, keys: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        """The decoded values under the keys, some thousand records at a time; None where a record lacks the key."""


class ListColumns:
    """The columns of records that are in memory."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def keys(self) -> list[str]:
        """All keys, in the order in which they first appear."""
        return list({key: None for record in self._records for key in record})

    def has(self, key: str) -> Mask:
        """Which records have the key."""
        return np.fromiter((key in record for record in self._records), bool, len(self._records))

    def column(self, key: str) -> Numbers:
        """The numbers under the key; NaN where there is none."""
        return np.fromiter((number(record.get(key)) for record in self._records), float, len(self._records))

    def load(self, keys: Iterable[str]) -> None:
        """There is nothing to read."""

    def blocks(self, keys: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        """The values under the keys of all records; None where a record lacks the key."""
        yield {key: [record.get(key) for record in self._records] for key in keys}


def number(value: Any) -> float:
    """A number as a float, infinite where it is too large for one; NaN for what is no number (also true and false)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
