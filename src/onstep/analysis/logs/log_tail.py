"""Follows a log that grows, is cut back by a resume or a rollback, or is replaced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from onstep.analysis.logs.lines import BLANK, FileSource, FileVersion, Piece
from onstep.analysis.logs.reading import read_log
from onstep.analysis.logs.record_file import decoded
from onstep.errors import DataError
from onstep.record import Record
from onstep.record.kinds import has_metrics

_TAIL_BYTES = 1 << 18
"""Bytes read from the end of a log at first."""
_MOST_MARKS = 10_000
_COMPARED_BYTES = 4096
"""Bytes of a line by which it is recognized; its timestamp is among them."""


class _Mark(NamedTuple):
    """A line that was read."""

    start: int
    stop: int
    digest: int


class LogTail:
    """Reads a log as it grows: `last` or `read` once, or neither, then `news` repeatedly, which begins with everything.

    A log that was cut back is recognized by the newest lines that were read, of which at least one must still be there:
    if none is, the whole log is news. Logs with one record per line, such as metrics logs, can be followed; of other
    layouts, only `read` returns records. A record that is being written is read once it is complete.

    Args:
        path: the log.
        wanted: whether `last` and `news` return a record; by default, whether it has metrics.

    Attributes:
        was_rewritten: whether the last `news` found that records read before had been cut off or replaced, as after a
            resume or a rollback.
        num_long_lines: number of lines of more than `lines.MAX_LINE_BYTES` that the last call skipped.

    Raises:
        FileNotFoundError: if the file does not exist.
    """

    def __init__(self, path: str | Path, wanted: Callable[[Record], bool] = has_metrics) -> None:
        self.path = Path(path)
        self._wanted = wanted
        self.was_rewritten = False
        self.num_long_lines = 0
        self._source = FileSource(self.path)
        self._read_version: FileVersion | None = None
        self._has_other_layout = False
        self._marks: deque[_Mark] = deque(maxlen=_MOST_MARKS)

    def last(self, number: int) -> list[Record]:
        """The last `number` records, newest last; `news` returns those that follow."""
        size = _TAIL_BYTES
        while True:
            start = max(0, self._source.size - size)
            self._marks.clear()
            records = self._read(start)
            if start == 0 or len(records) > number:
                return records[max(0, len(records) - number) :]
            size *= 8

    def read(self) -> Sequence[Record]:
        """All records that the log has now, in any layout, recovered as far as possible; `news` returns those after."""
        self._source = FileSource(self.path)
        self.last(0)
        try:
            records, _ = read_log(self.path, self._source)
        except DataError:
            records = []
        self._has_other_layout = bool(records) and not self._marks
        return records

    def news(self) -> list[Record]:
        """The records added since the last call; if the log was truncated or restarted, those from there on."""
        self.was_rewritten, self.num_long_lines = False, 0
        try:
            self._source = source = FileSource(self.path)
        except FileNotFoundError:  # just moved aside, and not restarted yet
            return []
        if source.version == self._read_version:
            return []
        position = self._position
        while self._marks and _mark_of(source, self._marks[-1].start, self._marks[-1].stop) != self._marks[-1]:
            self._marks.pop()
        self.was_rewritten = self._position < position or self._has_other_layout
        return self._read(self._position)

    @property
    def _position(self) -> int:
        """The end of the last record read."""
        return self._marks[-1].stop if self._marks else 0

    def _read(self, start: int) -> list[Record]:
        """The complete records in the bytes from `start` on that end after the current position."""
        records: list[Record] = []
        self.num_long_lines, self._read_version = 0, self._source.version
        for piece in self._source.pieces(start):
            if piece.is_too_long:
                self._marks.append(_mark_of(self._source, piece.offset, piece.stop))
                self.num_long_lines += 1
            else:
                records += self._records(piece)
        return records

    def _records(self, piece: Piece) -> list[Record]:
        records, offset = list[Record](), piece.offset
        for line in piece.lines:
            text = line.strip(BLANK + b",[]")
            begin = offset + line.find(text)
            if begin + len(text) > self._position and isinstance(record := decoded(text), dict):
                records += [record] if self._wanted(record) else []
                self._marks.append(_Mark(begin, begin + len(text), hash(text[:_COMPARED_BYTES])))
            offset += len(line) + 1
        return records


def _mark_of(source: FileSource, start: int, stop: int) -> _Mark:
    return _Mark(start, stop, hash(source.read(start, min(stop, start + _COMPARED_BYTES))))
