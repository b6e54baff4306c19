"""Lines of JSON that have the same keys in the same order: told apart in bulk, without decoding them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

_QUOTE, _NEWLINE, _COMMA, _OPEN, _CLOSE = b'"\n,{}'
_PADDING = b"\0" * 8
"""Behind the bytes, so that eight can be looked at from any of them."""
_PAIR = re.compile(
    rb'(?P<head>[{,][ \t]*"(?P<key>[^"\\]*)"[ \t]*:[ \t]*)'
    rb'(?:(?P<text>"(?:[^"\\]|\\[^"])*")|\[[^"{}\\]*\]|[^"{}\[\],\\ \t]+)'
)
"""A key without escapes, and a value without objects, lists of texts or quotes in a text."""


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
    is_text: tuple[bool, ...] = ()
    """Which values are texts in quotes."""
    tail: bytes = b""
    """Behind the last value."""

    @property
    def num_quotes(self) -> int:
        """Quotes in a line."""
        return 2 * len(self.keys) + 2 * sum(self.is_text)

    @property
    def is_plain(self) -> bool:
        """Whether values can be found without decoding the line."""
        return bool(self.heads)

    def match(self, lines: Lines, rows: Positions) -> NDArray[np.bool_]:
        """Which of the rows, all in braces and with `num_quotes` quotes, have this layout.

        Of lines that are JSON it is true; of a line that is not, each value may be damaged.
        """
        quotes = lines.first_quotes[rows]
        fits = np.ones(len(rows), bool)
        value_ends = lines.starts[rows]
        at, is_tight = 0, True
        for head, is_text in zip(self.heads, self.is_text, strict=True):
            begin = lines.quotes[quotes + at] - head.index(b'"')
            fits &= (begin == value_ends) if is_tight else (begin > value_ends)
            fits &= (begin >= 0) & (begin + len(head) <= lines.stops[rows])
            fits[fits] &= lines.are(head, begin[fits])
            value_ends = begin + len(head)
            at, is_tight = at + 2, is_text
            if is_text:
                fits &= lines.quotes[quotes + at] == value_ends
                value_ends = lines.quotes[quotes + at + 1] + 1
                at += 2
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
        at = 2 * index + 2 * sum(self.is_text[:index])
        first = lines.first_quotes[rows]
        begins = lines.quotes[first + at] + _behind_quote(self.heads[index])
        if index + 1 < len(self.keys):
            ends = lines.quotes[first + at + 2 + 2 * self.is_text[index]] - self.heads[index + 1].index(b'"')
        else:
            ends = lines.stops[rows] - len(self.tail)
        data = lines.data
        return [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def _behind_quote(head: bytes) -> int:
    """From the first quote of a head to its end."""
    return len(head) - head.index(b'"')


def layout_of(line: bytes) -> Layout | None:
    """The layout that a line of JSON is an example of; None where it has one that cannot be told apart in bulk."""
    heads, is_text, position = [], [], 0
    while (pair := _PAIR.match(line, position)) is not None:
        if (pair["head"][:1] == b"{") != (position == 0):
            return None
        heads.append(pair["head"])
        is_text.append(pair["text"] is not None)
        position = pair.end()
    tail = line[position:]
    keys = _keys(line)
    if not heads or tail.strip(b" \t") != b"}" or keys is None or len(keys) != len(heads):
        return None
    return Layout(keys, tuple(heads), tuple(is_text), tail)


def _keys(line: bytes) -> tuple[str, ...] | None:
    """The keys of a line that is a JSON object; fewer than stand there where one stands twice."""
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    return tuple(record) if isinstance(record, dict) else None
