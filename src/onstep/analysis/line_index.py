"""Where the records of a file stand and which keys they have, found in one pass over its lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onstep.analysis.line_layout import Layout, Lines, Positions, layout_of

_BLANK = b" \t\r\n\x00"
"""White space, and the zeros that some file systems leave after a power cut."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some editors put before UTF-8."""
_MOST_LAYOUTS = 256
"""Layouts that are told apart in bulk; lines of further ones are decoded one by one."""
_MOST_BAD_LINES = 1000
"""Of more, only the number is kept."""


@dataclass(frozen=True)
class BadLine:
    """A line that is no record."""

    number: int
    """Counted from 1."""
    offset: int
    """Of its first byte in the file."""
    text: bytes
    """How it begins."""


@dataclass
class LineIndex:
    """The records of a file, by the bytes from the opening to the closing brace."""

    starts: Positions
    stops: Positions
    layout_ids: Positions
    """Of each record, the position of its layout in `layouts`."""
    layouts: list[Layout] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)
    num_bad_lines: int = 0
    is_opened: bool = False
    """Whether the file begins with '['."""
    is_closed: bool = False
    """Whether it ends with ']'."""
    is_cut_short: bool = False
    """Whether its last line is a bad one."""


def index_lines(pieces: Iterable[tuple[int, bytes]]) -> LineIndex:
    """The index of a file that is given in pieces of whole lines, each with the position of its first byte."""
    indexer = _Indexer()
    for offset, data in pieces:
        indexer.add(offset, data)
    return indexer.result()


class _Indexer:
    def __init__(self) -> None:
        self._layouts: list[Layout] = []
        self._odd_ids: dict[tuple[str, ...], int] = {}
        """Layouts of lines that are decoded one by one, by their keys."""
        self._rows: list[tuple[Positions, Positions, Positions]] = []
        self._bad_lines: list[BadLine] = []
        self._num_bad_lines = 0
        self._num_lines = 0
        """Of the pieces before this one."""
        self._last_content = self._last_bad = self._closing = 0
        """Numbers of lines; 0 for none."""
        self._is_opened = False

    def add(self, offset: int, data: bytes) -> None:
        lines = Lines.of(data)
        ids = np.full(len(lines.starts), -1)
        self._recognise(lines, ids)
        starts, stops = lines.starts.copy(), lines.stops.copy()
        for row in np.flatnonzero(ids < 0).tolist():
            ids[row], starts[row], stops[row] = self._take_odd(lines, row, offset)
        rows = np.flatnonzero(ids >= 0)
        self._rows.append((starts[rows] + offset, stops[rows] + offset, ids[rows]))
        if len(rows):
            self._last_content = max(self._last_content, self._num_lines + int(rows[-1]) + 1)
        self._num_lines += len(lines.starts)

    def result(self) -> LineIndex:
        columns = zip(*self._rows, strict=True) if self._rows else [[np.zeros(0, np.int64)]] * 3
        starts, stops, ids = (np.concatenate(list(column)) for column in columns)
        return LineIndex(
            starts,
            stops,
            ids,
            self._layouts,
            self._bad_lines,
            self._num_bad_lines,
            is_opened=self._is_opened,
            is_closed=self._closing > 0 and self._closing >= self._last_content,
            is_cut_short=self._last_bad > 0 and self._last_bad >= max(self._last_content, self._closing),
        )

    def _recognise(self, lines: Lines, ids: Positions) -> None:
        """Write the ids of plain layouts into `ids`, learning new layouts from the first line that has one."""
        open_rows = np.flatnonzero(lines.are_in_braces())
        for layout_id, layout in enumerate(self._layouts):
            if layout.is_plain:
                open_rows = _assign(layout_id, layout, lines, open_rows, ids)
        for row in open_rows.tolist():
            if ids[row] >= 0 or len(self._layouts) >= _MOST_LAYOUTS:
                continue
            learned = layout_of(lines.line(row))
            if learned is not None:
                self._layouts.append(learned)
                open_rows = _assign(len(self._layouts) - 1, learned, lines, open_rows, ids)

    def _take_odd(self, lines: Lines, row: int, offset: int) -> tuple[int, int, int]:
        """Layout (-1: no record), start and stop of a line that was not recognised."""
        number = self._num_lines + row + 1
        start, stop = int(lines.starts[row]), int(lines.stops[row])
        if offset + start == 0 and lines.data.startswith(BYTE_ORDER_MARK):
            start = len(BYTE_ORDER_MARK)
        start, stop = _stripped(lines.data, start, stop, _BLANK + b",")
        if start == stop:
            return -1, start, stop
        if lines.data[start] == ord("[") and not (self._is_opened or self._last_content):
            self._is_opened = True
            start, stop = _stripped(lines.data, start + 1, stop, _BLANK)
        keys = _keys(lines.data[start:stop])
        if keys is None and lines.data[start:stop].endswith(b"]"):
            self._closing = number
            start, stop = _stripped(lines.data, start, stop - 1, _BLANK + b",")
            keys = _keys(lines.data[start:stop])
        if keys is not None:
            return self._odd_id(keys), start, stop
        if start < stop:
            self._note_bad(number, offset + start, lines.data[start:stop])
        return -1, start, stop

    def _odd_id(self, keys: tuple[str, ...]) -> int:
        if keys not in self._odd_ids:
            self._odd_ids[keys] = len(self._layouts)
            self._layouts.append(Layout(keys))
        return self._odd_ids[keys]

    def _note_bad(self, number: int, offset: int, text: bytes) -> None:
        self._last_content = self._last_bad = number
        self._num_bad_lines += 1
        if len(self._bad_lines) < _MOST_BAD_LINES:
            self._bad_lines.append(BadLine(number, offset, text[:80]))


def _assign(layout_id: int, layout: Layout, lines: Lines, rows: Positions, ids: Positions) -> Positions:
    """Give the rows that have the layout its id; the others are returned."""
    may_fit = rows[lines.num_quotes[rows] == layout.num_quotes]
    if len(may_fit) == 0:
        return rows
    ids[may_fit[layout.match(lines, may_fit)]] = layout_id
    return rows[ids[rows] < 0]


def _stripped(data: bytes, start: int, stop: int, blank: bytes) -> tuple[int, int]:
    while start < stop and data[start] in blank:
        start += 1
    while start < stop and data[stop - 1] in blank:
        stop -= 1
    return start, stop


def _keys(line: bytes) -> tuple[str, ...] | None:
    try:
        record: Any = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return tuple(record) if isinstance(record, dict) else None
