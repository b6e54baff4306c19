"""Reads files line by line, with a bound on the length of a line."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLANK = b" \t\r\n\x00"
"""White space, and the zeros that some file systems leave after a power failure."""
MAX_LINE_BYTES = 16 << 20
"""A longer line is skipped; decoding one of this length needs a few hundred megabytes at most."""
PIECE_BYTES = 1 << 22
"""Bytes of the file processed at once."""
_HEAD_BYTES = 80

FileVersion = tuple[int, int, int, int]
"""Device, inode, size in bytes and time of modification in nanoseconds."""


class Piece(NamedTuple):
    """Consecutive lines of a file, without their newlines."""

    offset: int
    """Offset of the first byte in the file."""
    stop: int
    """Offset of the byte after the last newline."""
    lines: list[bytes]
    is_too_long: bool = False
    """Whether this is the start of a single line of more than `MAX_LINE_BYTES`."""


class FileSource:
    """A file as long as it was when it was opened; it stays that one, even if it is replaced by another."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        self.version: FileVersion = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        weakref.finalize(self, os.close, self._descriptor)
        os.pread(self._descriptor, 1, 0)  # a file of no bytes may be one that cannot be read

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`, fewer if the file ends before."""
        return os.pread(self._descriptor, max(0, min(stop, self.size) - start), start)

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        """The lines from `start` to the end of the file, a few megabytes at a time."""
        position, rest = start, b""
        while data := self.read(position, position + PIECE_BYTES):
            data, position = rest + data, position + len(data)
            offset = position - len(data)
            first = data.find(b"\n") if len(data) > MAX_LINE_BYTES else 0
            if first < 0 or first > MAX_LINE_BYTES:
                position, rest = self._after_line(position if first < 0 else offset + first), b""
                yield Piece(offset, position, [data[:_HEAD_BYTES]], is_too_long=True)
                continue
            stop = data.rfind(b"\n")
            rest = data[stop + 1 :]
            if stop >= 0:
                yield Piece(offset, offset + stop + 1, data[:stop].split(b"\n"))
        if rest:
            yield Piece(position - len(rest), position, [rest])

    def is_blank(self) -> bool:
        """Whether the file contains nothing but white space and zeros."""
        position = 0
        while data := self.read(position, position + PIECE_BYTES):
            if data.strip(BLANK):
                return False
            position = self._after_hole(position + len(data))
        return True

    def _after_line(self, position: int) -> int:
        """The offset after the next newline, or the end of the file."""
        while data := self.read(position, position + PIECE_BYTES):
            if b"\n" in data:
                return position + data.index(b"\n") + 1
            position = self._after_hole(position + len(data))
        return position

    def _after_hole(self, position: int) -> int:
        """The next offset with data: holes of a sparse file, which may have terabytes, are not read."""
        try:
            return os.lseek(self._descriptor, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # the file system does not tell
                return position
            return max(position, os.fstat(self._descriptor).st_size)
