"""The records of a file with one record a line: columns are read without a dictionary per record."""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.line_index import LineIndex, index_lines
from onstep.analysis.line_layout import Lines, Positions
from onstep.errors import DataError
from onstep.journal import Record

logger: logging.Logger = logging.getLogger(__name__)

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


_PIECE_BYTES = 1 << 22
"""How much of the file is looked at at once."""
_MOST_NOTES = 50


class Source(Protocol):
    """Where the bytes are."""

    name: str
    size: int

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, fewer where the source ends before."""


class FileSource:
    """A file as it was when it was opened, also where another takes its name later."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`."""
        return os.pread(self._descriptor, max(0, min(stop, self.size) - start), start)


class MemorySource:
    """Bytes in memory."""

    def __init__(self, name: str, data: bytes | bytearray) -> None:
        self.name, self._data, self.size = name, memoryview(data), len(data)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`."""
        return bytes(self._data[start:stop])


class RecordFile(Sequence[Record]):
    """The records of a source with one record a line; a sequence that decodes what it is asked for.

    Attributes:
        line_index: where each record stands and which keys it has, and which lines are none.
        notes: what had to be recovered, in words; reading values may add to it.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.notes: list[str] = []
        self.line_index: LineIndex = index_lines(_pieces(source))
        self._columns: dict[str, Numbers] = {}
        self._masks: dict[str, Mask] = {}

    def __len__(self) -> int:
        return len(self.line_index.starts)

    @overload
    def __getitem__(self, row: int) -> Record: ...
    @overload
    def __getitem__(self, row: slice) -> list[Record]: ...
    def __getitem__(self, row: int | slice) -> Record | list[Record]:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"there is no record {row}; the log has {len(self)}.")
        row %= len(self)
        return self._decoded(row, self._source.read(int(self.line_index.starts[row]), int(self.line_index.stops[row])))

    def __iter__(self) -> Iterator[Record]:
        for rows, offset, data in self._read_rows():
            bounds = zip(rows, self.line_index.starts[rows] - offset, self.line_index.stops[rows] - offset, strict=True)
            for row, start, stop in bounds:
                yield self._decoded(row, data[start:stop])

    def keys(self) -> list[str]:
        """All keys, in the order in which they first appear."""
        used, first_rows = np.unique(self.line_index.layout_ids, return_index=True)
        layouts = [self.line_index.layouts[layout_id] for layout_id in used[np.argsort(first_rows)]]
        return list({key: None for layout in layouts for key in layout.keys})

    def has(self, key: str) -> Mask:
        """Which records have the key, shape (num_records,), read-only."""
        if key not in self._masks:
            having = np.array([key in layout.keys for layout in self.line_index.layouts], bool)
            mask = having[self.line_index.layout_ids] if len(having) else np.zeros(0, bool)
            mask.flags.writeable = False
            self._masks[key] = mask
        return self._masks[key]

    def column(self, key: str) -> Numbers:
        """The numbers under the key, shape (num_records,), read-only; NaN where there is none."""
        self.load([key])
        return self._columns[key]

    def load(self, keys: Iterable[str]) -> None:
        """Make several columns ready in one pass over the file."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._columns]
        columns = {key: np.full(len(self), np.nan) for key in missing}
        known = [key for key in missing if self.has(key).any()]
        if known:
            for rows, offset, data in self._read_rows():
                for having, key, values in self._values(known, rows, offset, data):
                    columns[key][rows.start + having] = self._numbers(values, key, rows.start + having)
        for column in columns.values():
            column.flags.writeable = False
        self._columns.update(columns)

    def blocks(self, keys: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        """The decoded values under the keys, some thousand records at a time; None where a record lacks the key."""
        for rows, offset, data in self._read_rows():
            block: dict[str, list[Any]] = {key: [None] * len(rows) for key in keys}
            for having, key, values in self._values(keys, rows, offset, data):
                column = block[key]
                decoded = self._decoded_values(values, key, rows.start + having)
                for row, value in zip(having.tolist(), decoded, strict=True):
                    column[row] = value
            yield block

    def _values(
        self, keys: Sequence[str], rows: range, offset: int, data: bytes
    ) -> Iterator[tuple[Positions, str, list[bytes]]]:
        """Which of the rows (counted from the first) have a key, the key, and its values as they stand in the file.

        Args:
            keys: The keys that are wanted.
            rows: Some records.
            offset: Where they begin in the source.
            data: Their bytes.
        """
        starts, stops = self.line_index.starts[rows.start : rows.stop], self.line_index.stops[rows.start : rows.stop]
        ids = self.line_index.layout_ids[rows.start : rows.stop]
        lines = Lines(data, starts - offset, stops - offset)
        for layout_id in np.unique(ids):
            layout, having = self.line_index.layouts[layout_id], np.flatnonzero(ids == layout_id)
            wanted = [key for key in keys if key in layout.keys]
            if layout.is_plain:
                yield from ((having, key, layout.values(lines, having, key)) for key in wanted)
            elif wanted:
                records = [self._decoded(rows.start + row, lines.line(row)) for row in having.tolist()]
                yield from ((having, key, [json.dumps(record[key]).encode() for record in records]) for key in wanted)

    def _read_rows(self) -> Iterator[tuple[range, int, bytes]]:
        """Rows, where their bytes begin in the source, and their bytes; a few megabytes at a time."""
        starts, stops = self.line_index.starts, self.line_index.stops
        row = 0
        while row < len(self):
            offset = int(starts[row])
            end = max(row + 1, int(np.searchsorted(stops, offset + _PIECE_BYTES, side="right")))
            yield range(row, end), offset, self._source.read(offset, int(stops[end - 1]))
            row = end

    def _decoded(self, row: int, line: bytes) -> Record:
        try:
            record: Any = json.loads(line.decode("utf-8", errors="replace"))
        except ValueError:
            return self._mended(row, line)
        assert isinstance(record, dict)
        return record

    def _mended(self, row: int, line: bytes) -> Record:
        """A record with a damaged value, which is NaN; the index does not look into values."""
        layout = self.line_index.layouts[self.line_index.layout_ids[row]]
        if not layout.is_plain or len(line) < self.line_index.stops[row] - self.line_index.starts[row]:
            raise DataError(f"record {row} of {self._source.name} was overwritten while it was read; read it again.")
        lines = Lines(line, np.array([0]), np.array([len(line)]))
        return {key: self._value(layout.values(lines, np.array([0]), key)[0], key, row) for key in layout.keys}

    def _numbers(self, values: list[bytes], key: str, rows: Positions) -> Numbers:
        try:
            return np.fromiter(map(float, values), float, len(values))
        except ValueError:
            decoded = [number(self._value(value, key, row)) for value, row in zip(values, rows.tolist(), strict=True)]
            return np.array(decoded)

    def _decoded_values(self, values: list[bytes], key: str, rows: Positions) -> list[Any]:
        """All at once where none is damaged."""
        try:
            decoded: list[Any] = json.loads((b"[" + b",".join(values) + b"]").decode("utf-8", errors="replace"))
        except ValueError:
            decoded = []
        if len(decoded) == len(values):
            return decoded
        return [self._value(value, key, row) for value, row in zip(values, rows.tolist(), strict=True)]

    def _value(self, value: bytes, key: str, row: int) -> Any:
        try:
            return json.loads(value.decode("utf-8", errors="replace"), strict=False)
        except ValueError:
            self._note_damage(f"the value of {key!r} in record {row} is damaged ({value[:30]!r}) and counts as NaN")
            return float("nan")

    def _note_damage(self, note: str) -> None:
        if note not in self.notes and len(self.notes) < _MOST_NOTES:
            self.notes.append(note)
            logger.warning("%s: %s", self._source.name, note)


def _pieces(source: Source) -> Iterator[tuple[int, bytes]]:
    """The source in pieces that end with a line, each with the position of its first byte."""
    offset, size = 0, _PIECE_BYTES
    while offset < source.size:
        data = source.read(offset, offset + size)
        if not data:
            return
        end = data.rfind(b"\n") + 1
        if offset + len(data) >= source.size:
            end = len(data)
        if end == 0:
            size *= 2
            continue
        yield offset, data[:end]
        offset, size = offset + end, _PIECE_BYTES
