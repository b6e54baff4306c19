"""Lines of JSON that have the same keys in the same order: told apart in bulk, without decoding them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

_QUOTE, _NEWLINE, _COMMA, _OPEN, _CLOSE, _BACKSLASH = b'"\n,{}\\'
_PADDING = b"\0" * 8
"""Behind the bytes, so that eight can be looked at from any of them."""
_PAIR = re.compile(
    rb'(?P<head>[{,][ \t]*"(?P<key>[^"\\]*)"[ \t]*:[ \t]*)'
    rb'(?:(?P<text>"(?:[^"\\]|\\[^"])*")|\[[^"{}\\]*\]|[^"{}\[\],\\ \t]+|(?P<nested>(?=[{\[])))'
)
"""A key without escapes, and a value: a text without quotes in it, a plain list, a number, or the start of others."""
_MARK = re.compile(rb'"[^"]*"|[\[\]{}]')
_BRACKETS = b"[]{}"


class Lines:
    """Lines in a piece of a file; positions count from the first byte of the piece.

    Attributes:
        starts: where each line begins.
        stops: behind the last byte of each, without the line break and a comma before it.
        quotes: where quotes stand.
        first_quotes: of each line, where its quotes begin in `quotes`.
        num_quotes: how many each line has.
    """

    def __init__(self, data: bytes, starts: Positions, stops: Positions) -> None:
        self.data = data
        self.starts, self.stops = starts, stops
        self._bytes = np.frombuffer(data + _PADDING, np.uint8)
        self._words = np.ndarray((len(data) + 1,), "<u8", self._bytes.data, strides=(1,))
        self.quotes: Positions = self._positions(_QUOTE)
        self.first_quotes: Positions = np.searchsorted(self.quotes, starts)
        self.num_quotes: Positions = np.searchsorted(self.quotes, stops) - self.first_quotes

    @cached_property
    def brackets(self) -> Positions:
        """Where brackets and braces stand outside of texts, in lines without a backslash."""
        letters = self._bytes[: len(self.data)]
        found = np.flatnonzero(np.isin(letters, np.frombuffer(_BRACKETS, np.uint8)))
        rows = np.searchsorted(self.starts, found, side="right") - 1
        num_before = np.searchsorted(self.quotes, found) - self.first_quotes[np.maximum(rows, 0)]
        outside: Positions = found[(rows >= 0) & (num_before % 2 == 0)]
        return outside

    @cached_property
    def has_backslash(self) -> NDArray[np.bool_]:
        """Which lines have one."""
        found = self._positions(_BACKSLASH)
        has: NDArray[np.bool_] = np.searchsorted(found, self.stops) > np.searchsorted(found, self.starts)
        return has

    def have_brackets(self, rows: Positions, brackets: bytes) -> NDArray[np.bool_]:
        """Which of the rows have these brackets outside of texts, one after another, and no backslash."""
        first = np.searchsorted(self.brackets, self.starts[rows])
        fits: NDArray[np.bool_] = np.searchsorted(self.brackets, self.stops[rows]) - first == len(brackets)
        fits &= ~self.has_backslash[rows]
        for at, bracket in enumerate(brackets):
            fits[fits] = self._bytes[self.brackets[first[fits] + at]] == bracket
        return fits

    @classmethod
    def of(cls, data: bytes) -> Lines:
        """All lines of the piece."""
        letters = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(letters == _NEWLINE)
        if data and not data.endswith(b"\n"):
            ends = np.append(ends, len(data))
        starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
        return cls(data, starts, ends - ((ends > starts) & (letters[ends - 1] == _COMMA)))

    def are_in_braces(self) -> NDArray[np.bool_]:
        """Which lines begin and end as an object does."""
        fits: NDArray[np.bool_] = self.stops - self.starts >= 2
        fits &= (self._bytes[self.starts] == _OPEN) & (self._bytes[self.stops - 1] == _CLOSE)
        return fits

    def line(self, row: int) -> bytes:
        """The bytes of one line without the comma."""
        return self.data[self.starts[row] : self.stops[row]]

    def are(self, literal: bytes, positions: Positions) -> NDArray[np.bool_]:
        """At which of the positions the literal stands."""
        offsets = [*range(0, len(literal) - 8, 8), max(len(literal) - 8, 0)]
        same = np.ones(len(positions), bool)
        for offset in offsets:
            piece = literal[offset : offset + 8]
            mask = np.uint64((1 << 8 * len(piece)) - 1)
            same &= (self._words[positions + offset] & mask) == int.from_bytes(piece, "little")
        return same

    def _positions(self, letter: int) -> Positions:
        return np.flatnonzero(self._bytes[: len(self.data)] == letter)


@dataclass(frozen=True)
class Layout:
    """What the lines of one layout share: all their bytes but those of the values."""

    keys: tuple[str, ...]
    heads: tuple[bytes, ...] = ()
    """Before each value: the separator, the key, the colon."""
    inner_quotes: tuple[int, ...] = ()
    """Quotes of each value: none of a number, two of a text, any number of a list or an object."""
    tail: bytes = b""
    """Behind the last value."""
    brackets: bytes = b""
    """All brackets and braces outside of texts, where a value holds others; else empty."""
    spans: tuple[tuple[int, int] | None, ...] = ()
    """Of each such value, the places of its first and its last bracket in `brackets`; None for other values."""

    @property
    def num_quotes(self) -> int:
        """Quotes in a line."""
        return 2 * len(self.keys) + sum(self.inner_quotes)

    @property
    def is_plain(self) -> bool:
        """Whether values can be found without decoding the line."""
        return bool(self.heads)

    def match(self, lines: Lines, rows: Positions) -> NDArray[np.bool_]:
        """Which of the rows, all in braces and with `num_quotes` quotes, have this layout.

        Of lines that are JSON it is true; of a line that is not, each value may be damaged.
        """
        if self.brackets:
            fits = lines.have_brackets(rows, self.brackets)
            fits[fits] = self._match_heads(lines, rows[fits])
            return fits
        return self._match_heads(lines, rows)

    def _match_heads(self, lines: Lines, rows: Positions) -> NDArray[np.bool_]:
        """Which of the rows have the heads and the tail where they belong."""
        quotes = lines.first_quotes[rows]
        first_brackets = np.searchsorted(lines.brackets, lines.starts[rows]) if self.brackets else quotes
        fits = np.ones(len(rows), bool)
        value_ends = lines.starts[rows]
        at, is_tight = 0, True
        for head, inner, span in zip(self.heads, self.inner_quotes, self.spans, strict=True):
            begin = lines.quotes[quotes + at] - head.index(b'"')
            fits &= (begin == value_ends) if is_tight else (begin > value_ends)
            fits &= (begin >= 0) & (begin + len(head) <= lines.stops[rows])
            fits[fits] &= lines.are(head, begin[fits])
            value_ends = begin + len(head)
            at, is_tight = at + 2, inner > 0 or span is not None
            if span is not None:
                fits &= lines.brackets[first_brackets + span[0]] == value_ends
                value_ends = lines.brackets[first_brackets + span[1]] + 1
            elif inner:
                fits &= lines.quotes[quotes + at] == value_ends
                value_ends = lines.quotes[quotes + at + 1] + 1
            at += inner
        begin = lines.stops[rows] - len(self.tail)
        fits &= (begin == value_ends) if is_tight else (begin > value_ends)
        fits[fits] &= lines.are(self.tail, begin[fits])
        return fits

    def values(self, lines: Lines, rows: Positions, key: str) -> list[bytes]:
        """The bytes of the values under `key` in rows of this layout: numbers, texts in quotes, lists, as they stand.

        Args:
            lines: Where the rows are.
            rows: Lines of this layout, by position.
            key: One of `keys`.
        """
        index = self.keys.index(key)
        at = 2 * index + sum(self.inner_quotes[:index])
        first = lines.first_quotes[rows]
        begins = lines.quotes[first + at] + _behind_quote(self.heads[index])
        if index + 1 < len(self.keys):
            ends = lines.quotes[first + at + 2 + self.inner_quotes[index]] - self.heads[index + 1].index(b'"')
        else:
            ends = lines.stops[rows] - len(self.tail)
        data = lines.data
        return [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _behind_quote(head: bytes) -> int:
    """From the first quote of a head to its end."""
    return len(head) - head.index(b'"')


def layout_of(line: bytes) -> Layout | None:
    """The layout that a line of JSON is an example of; None where it has one that cannot be told apart in bulk."""
    heads, inner_quotes, ends, position = [], [], [], 0
    while (pair := _PAIR.match(line, position)) is not None:
        if (pair["head"][:1] == b"{") != (position == 0):
            return None
        position = pair.end() if pair["nested"] is None else _end_of_value(line, pair.end())
        heads.append(pair["head"])
        ends.append((pair.end(), position) if pair["nested"] is not None else None)
        value = line[pair.start() + len(pair["head"]) : position]
        inner_quotes.append(value.count(b'"'))
    tail = line[position:]
    keys = _keys(line)
    if not heads or tail.strip(b" \t") != b"}" or keys is None or len(keys) != len(heads):
        return None
    if not any(ends):
        return Layout(keys, tuple(heads), tuple(inner_quotes), tail, spans=(None,) * len(keys))
    if b"\\" in line:
        return None
    marks = [match.start() for match in _MARK.finditer(line) if match[0] in _BRACKETS]
    spans = tuple(end and (marks.index(end[0]), marks.index(end[1] - 1)) for end in ends)
    return Layout(keys, tuple(heads), tuple(inner_quotes), tail, bytes(line[mark] for mark in marks), spans)


def _end_of_value(line: bytes, start: int) -> int:
    """Behind the bracket that closes the one at `start`; the end of the line where none does."""
    depth = 0
    for mark in _MARK.finditer(line, start):
        if mark[0] in b"[{":
            depth += 1
        elif mark[0] in b"]}":
            depth -= 1
            if depth == 0:
                return mark.end()
    return len(line)


def _keys(line: bytes) -> tuple[str, ...] | None:
    """The keys of a line that is a JSON object; fewer than stand there where one stands twice."""
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    return tuple(record) if isinstance(record, dict) else None
