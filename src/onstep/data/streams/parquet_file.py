"""Reads windows of Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import IO, Any, NamedTuple

from onstep.data.corpus.stream_files import open_stream_file, reading
from onstep.data.streams.line_file import Rows
from onstep.errors import extra

_ROWS_AT_ONCE = 256
_BUFFER_BYTES = 1 << 20


class _Window(NamedTuple):
    groups: range
    start: int
    """First row of the window, counted from the start of its row groups."""
    stop: int
    first: int
    """Number of rows in the row groups before."""


class ParquetFile:
    """A Parquet file, whose windows are runs of whole row groups or parts of a large one.

    Row groups before that of a window are not read.

    Args:
        columns: called with the names of the columns there are and the file's name; returns those to read.
    """

    def __init__(self, name: str, window_bytes: int, columns: Callable[[Sequence[str], str], Sequence[str]]) -> None:
        self.name = name
        self._window_bytes = window_bytes
        self._choose = columns
        self._raw: IO[bytes] | None = None
        self._file: Any = None
        self._plan: list[_Window] = []
        self._columns: list[str] = []
        self._rows: Iterator[tuple[str, Any]] = iter(())
        self._next: tuple[range, int] | None = None
        """The row groups of `_rows` and the number of their rows that are read."""

    def window(self, number: int) -> Rows:
        """The rows of a window; none beyond the last.

        Raises:
            DataError: for a file that cannot be read, or has no column to read.
        """
        with reading(self.name):
            self._open()
            if number >= len(self._plan):
                return [], True
            wanted = self._plan[number]
            if self._next != (wanted.groups, wanted.start):
                self._rows = self._rows_from(wanted)
            self._next = None
            rows = list(islice(self._rows, wanted.stop - wanted.start))
            self._next = wanted.groups, wanted.stop
        return rows, number + 1 == len(self._plan)

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        raw, self._raw, self._file, self._next, self._rows = self._raw, None, None, None, iter(())
        if raw is not None:
            raw.close()

    def _open(self) -> None:
        if self._file is not None:
            return
        with extra("datasets", f"reading {self.name} requires the library 'pyarrow'"):
            import pyarrow.parquet
        # Not whole column chunks at once: those of a large row group would fill the memory.
        self._raw = open_stream_file(self.name)
        self._file = pyarrow.parquet.ParquetFile(self._raw, buffer_size=_BUFFER_BYTES)
        self._columns = list(self._choose(self._file.schema_arrow.names, self.name))
        self._plan = list(self._planned())

    def _planned(self) -> Iterator[_Window]:
        metadata = self._file.metadata
        pending = size = num_rows = before = 0
        for group in range(metadata.num_row_groups):
            found = metadata.row_group(group)
            chunks = (found.column(number) for number in range(found.num_columns))
            size += sum(one.total_uncompressed_size for one in chunks if self._is_read(one.path_in_schema))
            num_rows += found.num_rows
            if size < self._window_bytes and group + 1 < metadata.num_row_groups:
                continue
            groups = range(pending, group + 1)
            parts = max(1, min(round(size / self._window_bytes), num_rows)) if len(groups) == 1 else 1
            cuts = [num_rows * part // parts for part in range(parts + 1)]
            yield from (_Window(groups, start, stop, before) for start, stop in pairwise(cuts))
            before, pending, size, num_rows = before + num_rows, group + 1, 0, 0

    def _is_read(self, path: str) -> bool:
        return any(path == column or path.startswith(f"{column}.") for column in self._columns)

    def _rows_from(self, window: _Window) -> Iterator[tuple[str, Any]]:
        """The rows of the row groups of a window, from its first row on."""
        at = 0
        for batch in self._file.iter_batches(_ROWS_AT_ONCE, row_groups=list(window.groups), columns=self._columns):
            skipped = min(max(window.start - at, 0), batch.num_rows)
            for number, row in enumerate(batch.slice(skipped).to_pylist(), window.first + at + skipped + 1):
                yield f"{self.name}, row {number:,}", row
            at += batch.num_rows
