"""Reads logs with one record per line: numbers as columns, records decoded on access."""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from onstep.errors import DataError
from onstep.metrics_log import Record

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]

BLANK = b" \t\r\n\x00"
"""White space, and the zeros that some file systems leave after a power failure."""
_BETWEEN = BLANK + b","
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Written by some editors at the start of UTF-8 files."""
_PIECE_BYTES = 1 << 22
"""Bytes of the file processed at once."""
_MOST_NOTES = 50
_MOST_BAD_LINES = 1000
"""Of further bad lines, only the number is kept."""


class ListColumns:
    """The columns of records in memory."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records

    def keys(self) -> list[str]:
        """All keys, in order of first appearance."""
        return list({key: None for record in self._records for key in record})

    def has(self, key: str) -> Mask:
        """Which records have the key."""
        return np.fromiter((key in record for record in self._records), bool, len(self._records))

    def column(self, key: str) -> Numbers:
        """The numbers of the key; NaN where there is none."""
        return _numbers([record.get(key) for record in self._records])

    def blocks(self, keys: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        """The values of the keys for all records; None where a record lacks the key."""
        yield {key: [record.get(key) for record in self._records] for key in keys}


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


class FileSource:
    """A file that stays the one that was opened, even if it is replaced by another."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.identity = (status.st_dev, status.st_ino)
        weakref.finalize(self, os.close, self._descriptor)

    def open(self) -> BinaryIO:
        """The file, positioned at its start."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return open(self._descriptor, "rb", closefd=False)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, fewer if the file ends before."""
        return os.pread(self._descriptor, max(0, stop - start), start)


class Line(NamedTuple):
    """A line of a file, without the array's brackets and separators."""

    number: int
    """Counted from 1."""
    offset: int
    """Offset of its first byte in the file."""
    text: bytes


@dataclass(frozen=True)
class _Alike:
    """The records with the same keys within a block of up to a few thousand consecutive records."""

    rows: NDArray[np.int64]
    keys: tuple[str, ...]
    numbers: dict[str, Numbers]
    """Columns of the keys with a number in any of the records."""


class RecordFile(Sequence[Record]):
    """The records of a file with one record per line. The file is read once; records are decoded again on access.

    Attributes:
        bad_lines: the first lines that are not records.
        num_bad_lines: number of such lines.
        is_opened: whether the file begins with '['.
        is_closed: whether it ends with ']'.
        notes: remarks on values that had to be recovered within records.
    """

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self.notes: list[str] = []
        self.bad_lines: list[Line] = []
        self.num_bad_lines = 0
        self.is_opened = self.is_closed = False
        self._num_lines = self._last_line = self._last_bad = self._num_records = 0
        self._alike: list[_Alike] = []
        self._columns: dict[str, Numbers] = {}
        self._masks: dict[str, Mask] = {}
        bounds = [np.zeros((2, 0), np.int64)]
        with source.open() as file:
            while lines := file.readlines(_PIECE_BYTES):
                bounds.append(self._add(self._stripped(file.tell() - sum(map(len, lines)), lines)))
        self._starts, self._stops = np.concatenate(bounds, axis=1)

    @property
    def is_cut_short(self) -> bool:
        """Whether the last line is bad."""
        return self._last_bad == self._last_line > 0

    def __len__(self) -> int:
        return self._num_records

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
        return self._decoded(row, self._source.read(int(self._starts[row]), int(self._stops[row])))

    def __iter__(self) -> Iterator[Record]:
        return chain.from_iterable(self._read())

    def keys(self) -> list[str]:
        """All keys, in order of first appearance."""
        return list({key: None for alike in self._alike for key in alike.keys})

    def has(self, key: str) -> Mask:
        """Which records have the key, shape (num_records,), read-only."""
        if key not in self._masks:
            mask = np.zeros(len(self), bool)
            for alike in self._alike:
                mask[alike.rows] = key in alike.keys
            mask.flags.writeable = False
            self._masks[key] = mask
        return self._masks[key]

    def column(self, key: str) -> Numbers:
        """The numbers of the key, shape (num_records,), read-only; NaN where there is none."""
        if key not in self._columns:
            column = np.full(len(self), np.nan)
            for alike in self._alike:
                column[alike.rows] = alike.numbers.get(key, np.nan)
            column.flags.writeable = False
            self._columns[key] = column
        return self._columns[key]

    def blocks(self, keys: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        """The decoded values of the keys, a few thousand records at a time; None where a record lacks the key."""
        for records in self._read():
            yield {key: [record.get(key) for record in records] for key in keys}

    def _read(self) -> Iterator[list[Record]]:
        """Decode the records again, a few megabytes at a time."""
        row = 0
        while row < len(self):
            offset = int(self._starts[row])
            end = max(row + 1, int(np.searchsorted(self._stops, offset + _PIECE_BYTES, side="right")))
            data = self._source.read(offset, int(self._stops[end - 1]))
            bounds = zip(self._starts[row:end] - offset, self._stops[row:end] - offset, strict=True)
            texts = [data[start:stop] for start, stop in bounds]
            yield _decoded_together(texts) or [self._decoded(one, text) for one, text in enumerate(texts, row)]
            row = end

    def _stripped(self, offset: int, whole_lines: list[bytes]) -> list[Line]:
        """The non-empty lines without the array's brackets; records where the brackets are."""
        lines: list[Line] = []
        for number, line in enumerate(whole_lines, self._num_lines + 1):
            text = line.rstrip(_BETWEEN)
            end = offset + len(text)
            if not text.startswith(b"{"):
                text = (text.removeprefix(BYTE_ORDER_MARK) if offset == 0 else text).lstrip(_BETWEEN)
                if text.startswith(b"[") and not (self.is_opened or self._num_records or lines):
                    self.is_opened = True
                    text = text[1:].lstrip(BLANK)
            start = end - len(text)
            closes = text.endswith(b"]")
            if closes:
                text = text[:-1].rstrip(_BETWEEN)
            if text or closes:
                self.is_closed, self._last_line = closes, number
            if text:
                lines.append(Line(number, start, text))
            self._num_lines, offset = number, offset + len(line)
        return lines

    def _add(self, lines: list[Line]) -> NDArray[np.int64]:
        """Add the records of some lines; returns their start and end offsets, shape (2, num_records)."""
        records = _decoded_together([line.text for line in lines])
        if records is None:
            lines, records = self._decoded_one_by_one(lines)
        rows: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, keys in enumerate(map(tuple, records)):
            rows[keys].append(row)
        for keys, chosen in rows.items():
            values = zip(*(records[row].values() for row in chosen), strict=True)
            columns = dict(zip(keys, map(_numbers, values), strict=True))
            known = {key: column for key, column in columns.items() if not np.isnan(column).all()}
            self._alike.append(_Alike(np.array(chosen) + self._num_records, keys, known))
        self._num_records += len(records)
        starts = np.array([line.offset for line in lines], np.int64)
        return np.stack([starts, starts + np.array([len(line.text) for line in lines], np.int64)])

    def _decoded_one_by_one(self, lines: list[Line]) -> tuple[list[Line], list[Record]]:
        """The lines that are records, and the records; notes damage."""
        good: list[Line] = []
        records: list[Record] = []
        for line in lines:
            record, damaged = _decode_or_repair(line.text)
            if record is None:
                self._last_bad = line.number
                self.num_bad_lines += 1
                if self.num_bad_lines <= _MOST_BAD_LINES:
                    self.bad_lines.append(line._replace(text=line.text[:80]))
                continue
            for key, value in damaged.items():
                where = f"{key!r} in record {self._num_records + len(records)}"
                if len(self.notes) < _MOST_NOTES:
                    self.notes.append(f"the value of {where} is damaged ({value[:30]!r}) and counts as NaN")
            good.append(line)
            records.append(record)
        return good, records

    def _decoded(self, row: int, text: bytes) -> Record:
        record, _ = _decode_or_repair(text)
        if record is None:
            raise DataError(
                f"record {row} of {self._source.name} was overwritten while it was being read; read it again."
            )
        return record


def _decoded_together(texts: list[bytes]) -> list[Record] | None:
    """Decode lines together, which is faster than one by one; None if one of them is not a record."""
    try:
        records = json.loads((b"[" + b",\n".join(texts) + b"]").decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return records if len(records) == len(texts) and {*map(type, records)} <= {dict} else None


def decoded(text: bytes) -> Any:
    """Decode a piece of JSON; None if it is invalid."""
    try:
        return json.loads(text.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


_PAIR = re.compile(
    rb'[{,][ \t]*"(?P<key>[^"\\]*)"[ \t]*:[ \t]*'
    rb'(?P<value>"(?:[^"\\]|\\[^"])*"|[^"{}\[\],\\ \t]+|(?P<nested>[{\[]))'
)
"""A key without escapes, and a value: a string without quotes, a number, or the start of a list or object."""
_BRACKET = re.compile(rb'"[^"]*"|(?P<open>[{\[])|[}\]]')


def _decode_or_repair(line: bytes) -> tuple[Record | None, dict[str, bytes]]:
    """Decode a record, with NaN for values that are not JSON, and these values by key; None if it is beyond repair."""
    record = decoded(line)
    if record is not None:
        return (record if isinstance(record, dict) else None), {}
    values, damaged, position = Record(), dict[str, bytes](), 0
    while (pair := _PAIR.match(line, position)) is not None and (line[position : position + 1] == b"{") == (
        not position
    ):
        position = pair.end() if pair["nested"] is None else _end_of_value(line, pair.start("nested"))
        key, value = pair["key"].decode("utf-8", errors="replace"), line[pair.start("value") : position]
        try:
            values[key] = json.loads(value.decode("utf-8", errors="replace"), strict=False)
        except (ValueError, RecursionError):
            values[key], damaged[key] = math.nan, value
    return (values if values and line[position:].strip(b" \t") == b"}" else None), damaged


def _end_of_value(line: bytes, start: int) -> int:
    """The position after the bracket that closes the one at `start`; the end of the line if there is none."""
    depth = 0
    for mark in _BRACKET.finditer(line, start):
        if not mark[0].startswith(b'"'):
            depth += 1 if mark["open"] else -1
        if depth == 0:
            return mark.end()
    return len(line)
