"""Collects Megatron Bridge's tags of an interval for the metrics log, so that trackers can be filled from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onstep.trackers.numbers import is_step, numbers_of, plain_number

logger: logging.Logger = logging.getLogger(__name__)

_MOST_UNREAD = 1000
"""Maximum number of steps whose values are kept on the device."""

VS_SAMPLES = " vs samples"
"""Suffix of curves over consumed samples."""


@dataclass(frozen=True)
class TagRow:
    """The tags of one step."""

    step: int
    samples: int
    timestamp: float
    """Unix seconds."""
    tags: dict[str, Any]
    over_samples: Sequence[str] = ()
    """Tags that are also shown over samples."""


class TagRecord:
    """Collects tags step by step, with values that may still be on a device, until a record of the metrics log is
    written.

    Args:
        read: converts a batch of values to plain numbers, reading tensors together.
        clock: returns Unix seconds.
    """

    def __init__(
        self,
        read: Callable[[Sequence[Any]], Sequence[Any]] = list,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._read, self._clock = read, clock
        self.clear()

    def __len__(self) -> int:
        """Number of steps with tags."""
        return len(self._rows)

    def clear(self) -> None:
        """Discard everything."""
        self._rows: list[TagRow] = []
        self._num_read = 0
        """Number of leading rows with plain numbers."""
        self._over_samples: dict[str, None] = {}

    def add_tags(self, over_steps: Mapping[str, Any], over_samples: Mapping[str, Any], step: int, samples: int) -> None:
        """Record tags of a step; `over_samples` contains those also shown over samples."""
        self._over_samples |= dict.fromkeys(tag.removesuffix(VS_SAMPLES) for tag in over_samples)
        if not self._rows or self._rows[-1].step != step:
            if len(self._rows) - self._num_read >= _MOST_UNREAD:
                self._read_all()
            self._rows.append(TagRow(step, samples, self._clock(), {}))
        self._rows[-1].tags.update(over_steps)
        self._num_read = min(self._num_read, len(self._rows) - 1)

    def take(self, reads: bool = True) -> dict[str, Any]:
        """Return `columns` and, unless that is {}, clear the record."""
        columns = self.columns(reads)
        if columns:
            self.clear()
        return columns

    def columns(self, reads: bool = True) -> dict[str, Any]:
        """Return `state_dict()`; without `reads`, {} if a value is still on a device."""
        if not reads and not all(isinstance(value, (int, float)) for row in self._rows for value in row.tags.values()):
            return {}
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """One column per tag, with None for steps without it; a constant column is a single value. {} if empty.

        Reads the device once.
        """
        if not self._rows:
            return {}
        self._read_all()
        tags = dict.fromkeys(tag for row in self._rows for tag in row.tags)
        return {
            "step": [row.step for row in self._rows],
            "samples": [row.samples for row in self._rows],
            "timestamp": [round(row.timestamp, 3) for row in self._rows],
            "tags": {tag: _packed([row.tags.get(tag) for row in self._rows]) for tag in tags},
            "vs_samples": [tag for tag in self._over_samples if tag in tags],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the record of a checkpoint; what does not fit together is left out, with a warning."""
        self.clear()
        rows = checked_rows(state_dict)
        if rows is None:
            logger.warning("the checkpoint's tags since the last record of the metrics log are damaged and left out")
        self._rows = rows or []
        self._over_samples = dict.fromkeys(tag for row in self._rows for tag in row.over_samples)

    def _read_all(self) -> None:
        unread = self._rows[self._num_read :]
        numbers = iter(self._read([value for row in unread for value in row.tags.values()]))
        for row in unread:
            row.tags.update({tag: plain_number(next(numbers)) for tag in row.tags})
        self._num_read = len(self._rows)


def rows_of(columns: Mapping[str, Any]) -> Iterator[TagRow]:
    """The rows of a record's columns."""
    tags: dict[str, Any] = columns.get("tags", {})
    heads = zip(*(columns.get(name, ()) for name in ("step", "samples", "timestamp")), strict=True)
    for row, (step, samples, timestamp) in enumerate(heads):
        values = {tag: one[row] if isinstance(one, list) else one for tag, one in tags.items()}
        found = {tag: value for tag, value in values.items() if value is not None}
        yield TagRow(step, samples, timestamp, found, [tag for tag in columns.get("vs_samples", ()) if tag in found])


def checked_rows(columns: Any) -> list[TagRow] | None:
    """The rows of a record's columns; None if they do not fit together."""
    try:
        rows = [replace(row, tags=numbers_of(row.tags)) for row in rows_of(columns)]
        fit = all(is_step(row.step) and is_step(row.samples) and abs(row.timestamp) < 2**53 for row in rows)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None
    return rows if fit else None


def _packed(values: list[Any]) -> Any:
    is_constant = values[0] is not None and all(value == values[0] for value in values)
    return values[0] if is_constant else values
