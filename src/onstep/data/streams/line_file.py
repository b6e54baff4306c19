"""Reads windows of files with a JSON object on each line."""

from __future__ import annotations

from typing import IO, Any

from onstep.data.corpus.documents import MAX_RECORD_BYTES
from onstep.data.corpus.stream_files import decompressed, kind_of, open_stream_file, reading, size_of_file
from onstep.errors import DataError

Rows = tuple[list[tuple[str, Any]], bool]
"""The place of each row and the row itself, and whether no window follows."""


class LineFile:
    """A file of lines, of which window n has those that begin in the n-th `window_bytes` of its decompressed bytes.

    Any window of a plain file is read without those before it; a compressed file is read up to it.
    """

    def __init__(self, name: str, window_bytes: int) -> None:
        self.name = name
        self._window_bytes = window_bytes
        self._compression = kind_of(name)[1]
        self._raw: IO[bytes] | None = None
        self._file: IO[bytes] | None = None
        self._size: int | None = None
        self._at = 0
        self._next: int | None = None
        """The window that begins with the line at `_at`; None if that is not known."""

    def window(self, number: int) -> Rows:
        """The lines of a window; none beyond the last.

        Raises:
            DataError: for a file that cannot be read, or a line that is too long.
        """
        start, stop = number * self._window_bytes, (number + 1) * self._window_bytes
        rows: list[tuple[str, Any]] = []
        with reading(self.name):
            file = self._open()
            if self._size is not None and start >= self._size:
                return [], True
            if self._next != number:
                self._go_to(file, start)
            self._next = None
            while self._at < stop:
                line = file.readline(MAX_RECORD_BYTES + 1)
                if not line:
                    return rows, True
                place = f"{self.name}, byte {self._at:,}"
                if len(line) > MAX_RECORD_BYTES:
                    raise DataError(
                        f"{place}: a line of more than {MAX_RECORD_BYTES:,} bytes, the limit; divide the record, or "
                        "leave it out"
                    )
                if line.strip():
                    rows.append((place, line))
                self._at += len(line)
            self._next = number + 1
        return rows, self._size is not None and self._at >= self._size

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        opened, self._raw, self._file, self._next = (self._file, self._raw), None, None, None
        for file in opened:
            if file is not None:
                file.close()

    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._raw = open_stream_file(self.name)
            self._size = None if self._compression else size_of_file(self._raw)
            self._file, self._next = decompressed(self._raw, self._compression), None
        return self._file

    def _go_to(self, file: IO[bytes], start: int) -> None:
        """Go to the first line that begins at byte `start` or later."""
        self._at = max(start - 1, 0)
        file.seek(self._at)
        while start:
            rest = file.readline(MAX_RECORD_BYTES)
            self._at += len(rest)
            if not rest or rest.endswith(b"\n"):
                return
