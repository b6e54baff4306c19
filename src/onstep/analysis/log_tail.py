"""The newest records of a log, also of one that is being written, and of one that another takes the place of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from onstep.analysis.line_index import index_lines
from onstep.analysis.record_file import FileSource
from onstep.journal import Record

_TAIL_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20


class LogTail:
    """Reads a log from its end on: `last` once, then `news` again and again.

    The log has one record a line, as a journal has; of another layout there is nothing to read. A record that is just
    being written is read when it is whole.

    Attributes:
        was_rewritten: whether the last `news` found other records in place of some that were read before, as after a
            resume or a rollback.

    Raises:
        FileNotFoundError: when there is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.was_rewritten = False
        self._source = FileSource(self.path)
        self._position = 0
        """Behind the last record that was read."""

    def last(self, number: int) -> list[Record]:
        """The last records, the newest last; `news` gives those that follow."""
        size = _TAIL_BYTES
        while True:
            start = max(0, self._source.size - size)
            self._position = 0
            records = self._read(start)
            if start == 0 or len(records) > number:
                return records[max(0, len(records) - number) :]
            size *= 8

    def news(self) -> list[Record]:
        """The records that came since; where the log was cut back or begun anew, those from there on."""
        self.was_rewritten = False
        try:
            source = FileSource(self.path)
        except FileNotFoundError:  # between being set aside and being begun anew
            return []
        same = self._common_with(source)
        if same < self._position:
            self.was_rewritten = True
            self._position = same
        self._source = source
        line = source.read(0, self._position).rfind(b"\n") + 1 if self.was_rewritten else self._position
        return self._read(line)

    def _read(self, start: int) -> list[Record]:
        """The whole records in the bytes from `start` on that end behind the position."""
        data = self._source.read(start, self._source.size)
        index = index_lines([(start, data)])
        is_new = index.stops > self._position
        starts, stops = index.starts[is_new].tolist(), index.stops[is_new].tolist()
        records = [_decoded(data[begin - start : end - start]) for begin, end in zip(starts, stops, strict=True)]
        self._position = max([self._position, *stops[-1:]])
        return [record for record in records if record is not None]

    def _common_with(self, source: FileSource) -> int:
        """Up to where the log is still what was read before."""
        if source.identity == self._source.identity:
            return self._position if source.size >= self._position else 0
        for start in range(0, self._position, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, self._position)
            old, new = self._source.read(start, stop), source.read(start, stop)
            if old != new:
                return start + _num_equal(old, new)
        return self._position


def _num_equal(a: bytes, b: bytes) -> int:
    """How many bytes at the beginning are the same."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(np.frombuffer(a[:length], np.uint8) != np.frombuffer(b[:length], np.uint8))
    return int(differs[0]) if len(differs) else length


def _decoded(line: bytes) -> Record | None:
    """The record; None for a damaged one that looks whole."""
    try:
        record: Record = json.loads(line.decode("utf-8", errors="replace"))
    except ValueError:
        return None
    return record
