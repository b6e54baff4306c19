"""Defines what trackers are fed from: the record of a run or, where there is none, lines in memory."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Protocol

from onstep.errors import OnstepError
from onstep.processes.forking import release_in_forked_children
from onstep.record import Record

MOST_IN_MEMORY = 100_000
"""Lines that wait for a tracker where there is no record; the oldest are dropped beyond."""
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Line:
    """A line and its place."""

    data: Record
    end: int
    """The position after it."""
    size: int = 0
    digest: str = ""


class TakenBackError(OnstepError):
    """The record continues from an earlier place: a line that was read is no longer in it."""


class Lines(Protocol):
    """Lines in order, with positions: 0 precedes the first one."""

    def read(self, after: Line) -> list[Line]:
        """Some lines after one that was read; [] if there are none.

        Raises:
            TakenBackError: if that one is not there.
        """

    def has(self, line: Line) -> bool:
        """Whether a line that was read is still there, and is still the same."""

    def append(self, data: Record, step: int) -> None:
        """Append a line."""


class RecordLines:
    """The lines of a run's `record.jsonl`, which another thread or process writes.

    Args:
        append: appends a line to the record, with a step.
    """

    def __init__(self, path: Path, append: Callable[[Record, int], None] | None = None) -> None:
        self._path, self._append = path, append
        self._descriptor: int | None = None
        release_in_forked_children(self, RecordLines.close)

    def read(self, after: Line) -> list[Line]:
        """The complete lines in the next block, at least one if there is one; a damaged line has no data.

        Raises:
            TakenBackError: if the file does not have the line.
        """
        descriptor, size, position = self._opened(), _BLOCK, after.end - after.size
        if descriptor is None:
            return []
        block = os.pread(descriptor, size, position)
        while len(block) == size and b"\n" not in block[after.size :]:
            size *= 2
            block = os.pread(descriptor, size, position)
        if after.end and _digest(block[: after.size]) != after.digest:
            raise TakenBackError(f"{self._path} was cut before byte {after.end}.")
        block, position, lines = block[after.size :], after.end, []
        for text in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
            position += len(text)
            lines.append(Line(_decoded(text), position, len(text), _digest(text)))
        return lines

    def has(self, line: Line) -> bool:
        """Whether the file has it at its place."""
        descriptor = self._opened()
        if descriptor is None:
            return line.end == 0
        return line.end == 0 or _digest(os.pread(descriptor, line.size, line.end - line.size)) == line.digest

    def append(self, data: Record, step: int) -> None:
        """Append a line to the record.

        Raises:
            ValueError: if it was opened for reading only.
        """
        if self._append is None:
            raise ValueError(f"{self._path} was opened for reading.")
        self._append(data, step)

    def close(self) -> None:
        """Close the file; a later `read` opens it again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = close

    def _opened(self) -> int | None:
        """The file with the record's name; the one that was opened before if its directory was moved."""
        try:
            there = self._path.stat()
            if self._descriptor is not None and not os.path.samestat(there, os.fstat(self._descriptor)):
                self.close()
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDONLY)
        except OSError:
            pass
        return self._descriptor


class MemoryLines:
    """Lines in memory, at most `MOST_IN_MEMORY`; those that every reader has may be dropped by `forget`."""

    def __init__(self, lines: Iterable[Record] = ()) -> None:
        self._lock, self._end = Lock(), 0
        self._lines: deque[Line] = deque(maxlen=MOST_IN_MEMORY)
        for line in lines:
            self._add(line)

    def read(self, after: Line) -> list[Line]:
        """All lines after one."""
        with self._lock:
            return [line for line in self._lines if line.end > after.end]

    def has(self, line: Line) -> bool:
        """Always."""
        return True

    def append(self, data: Record, step: int) -> None:
        """Append a line."""
        self._add({"global_step": step, **data})

    def forget(self, position: int) -> None:
        """Drop the lines up to a position."""
        with self._lock:
            while self._lines and self._lines[0].end <= position:
                self._lines.popleft()

    def _add(self, data: Record) -> None:
        with self._lock:
            self._end += 1
            self._lines.append(Line(data, self._end))


def _decoded(text: bytes) -> Record:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _digest(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()
