"""Reads logs with one record per line: numbers as columns, records decoded on access."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.columns import Columns
from onstep.analysis.logs.lines import BLANK, PIECE_BYTES, FileSource, Piece
from onstep.errors import DataError
from onstep.files.bounded_reading import MAX_NESTING, check_nesting
from onstep.record import Record
from onstep.record.kinds import has_metrics

_BETWEEN = BLANK + b","
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Written by some editors at the start of UTF-8 files."""
_MOST_NOTES = 50
_MOST_BAD_LINES = 1000
"""Of further bad lines, only the number is kept."""


class Line(NamedTuple):
    """A line of a file, without the array's brackets and separators."""

    number: int
    """Counted from 1."""
    offset: int
    """Offset of its first byte in the file."""
    text: bytes


class RecordFile(Sequence[Record]):
    """The records of a file with one record per line. The file is read once; records are decoded again on access.

    Attributes:
        columns: the numbers of the records by key.
        long_lines: the first lines of more than `lines.MAX_LINE_BYTES`, which are skipped.
        num_long_lines: number of such lines.
        bad_lines: the first lines that are not records.
        num_bad_lines: number of such lines.
        is_opened: whether the file begins with '['.
        is_closed: whether it ends with ']'.
        notes: remarks on values that had to be recovered within records.
    """

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self.notes: list[str] = []
        self.columns = Columns()
        self.bad_lines: list[Line] = []
        self.long_lines: list[Line] = []
        self.num_bad_lines = self.num_long_lines = 0
        self.is_opened = self.is_closed = False
        self._num_lines = self._last_line = self._last_bad = 0
        bounds = [np.zeros((2, 0), np.int64)]
        for piece in source.pieces():
            if piece.is_too_long:
                self._skip(piece)
            else:
                bounds.append(self._add(self._stripped(piece)))
        self._starts, self._stops = np.concatenate(bounds, axis=1)

    @property
    def is_cut_short(self) -> bool:
        """Whether the last line is bad."""
        return self._last_bad == self._last_line > 0

    def __len__(self) -> int:
        return self.columns.num_records

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = object.__hash__

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
        return chain.from_iterable(self.blocks())

    def blocks(self) -> Iterator[list[Record]]:
        """The decoded records, a few megabytes at a time."""
        row = 0
        while row < len(self):
            offset = int(self._starts[row])
            end = max(row + 1, int(np.searchsorted(self._stops, offset + PIECE_BYTES, side="right")))
            data = self._source.read(offset, int(self._stops[end - 1]))
            bounds = zip(self._starts[row:end] - offset, self._stops[row:end] - offset, strict=True)
            texts = [data[start:stop] for start, stop in bounds]
            yield _decoded_together(texts) or [self._decoded(one, text) for one, text in enumerate(texts, row)]
            row = end

    def _skip(self, piece: Piece) -> None:
        """Skip a line that is too long."""
        self._num_lines += 1
        self._last_line, self.is_closed = self._num_lines, False
        self.num_long_lines += 1
        if self.num_long_lines <= _MOST_BAD_LINES:
            self.long_lines.append(Line(self._num_lines, piece.offset, piece.lines[0]))

    def _stripped(self, piece: Piece) -> list[Line]:
        """The non-empty lines without the array's brackets; records where the brackets are."""
        lines: list[Line] = []
        offset = piece.offset
        for number, line in enumerate(piece.lines, self._num_lines + 1):
            text = line.rstrip(_BETWEEN)
            end = offset + len(text)
            if not text.startswith(b"{"):
                text = (text.removeprefix(BYTE_ORDER_MARK) if offset == 0 else text).lstrip(_BETWEEN)
                if text.startswith(b"[") and not (self.is_opened or len(self) or lines):
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
            self._num_lines, offset = number, offset + len(line) + 1
        return lines

    def _add(self, lines: list[Line]) -> NDArray[np.int64]:
        """Add the records of some lines; returns their start and end offsets, shape (2, num_records)."""
        records = _decoded_together([line.text for line in lines])
        if records is None:
            lines, records = self._decoded_one_by_one(lines)
        kept = [pair for pair in zip(lines, records, strict=True) if has_metrics(pair[1])]
        lines, records = [line for line, _ in kept], [record for _, record in kept]
        self.columns.add(records)
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
                where = f"{key!r} in record {len(self) + len(records)}"
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
    """Decode lines together, which is faster than one by one; None if one of them is not a record or nested deeply."""
    data = b"[" + b",\n".join(texts) + b"]"
    has_more = data.count(b"{") + data.count(b"[") > len(texts) + 1
    if has_more and any(text.count(b"{") + text.count(b"[") > MAX_NESTING for text in texts):
        return None
    try:
        records = json.loads(data.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return records if len(records) == len(texts) and {*map(type, records)} <= {dict} else None


def decoded(text: bytes) -> Any:
    """Decode a piece of JSON; None if it is invalid or nested more than `MAX_NESTING` levels deep."""
    try:
        value = json.loads(text.decode("utf-8", errors="replace"))
        check_nesting(value)
    except (ValueError, RecursionError):
        return None
    return value


def objects_in(path: Path) -> Iterator[Record]:
    """The JSON objects in a file with one in each line, in order; none if it is missing.

    A line that a crash has torn, that is too long or that holds something else is skipped.

    Raises:
        OSError: if the file exists and cannot be read.
    """
    for piece in FileSource(path).pieces() if path.is_file() else ():
        for line in [] if piece.is_too_long else piece.lines:
            if isinstance(found := decoded(line.strip(BLANK)), dict):
                yield found


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
            check_nesting(values[key])
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
