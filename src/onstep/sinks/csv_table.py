"""A CSV file of numbers by step and kind that only grows, survives a kill at any moment, and may gain columns."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from onstep.errors import OnstepError

KEYS = ["step", "kind"]
_Row = dict[str, str]


class NoTableError(OnstepError):
    """A file that is no such table."""


class CsvTable:
    """One row for each (step, kind); what is put into a row of the last step again is merged into it.

    A row is appended in one write. A new column, and a merge, replace the file in one atomic step, so that a reader or
    a kill never meets a half-written table. It is durable when it is closed: until then a power cut may cost rows,
    which the journal has.

    Args:
        path: The file; its folder must exist.
        keeps: Whether the rows of a step stay; asked for each row that is there.

    Raises:
        NoTableError: when the file is something else.
    """

    def __init__(self, path: Path, keeps: Callable[[int], bool]) -> None:
        self.path = path
        self._columns: list[str] = list(KEYS)
        self._last_step: int | None = None
        self._last_rows: dict[str, _Row] = {}
        """The rows of the last step, by kind."""
        self._last_offset = 0
        """Where they begin in the file."""
        self._descriptor: int | None = None
        self._take_over(keeps)

    def put(self, step: int, kind: str, cells: Mapping[str, str]) -> None:
        """Add cells to the row of a step and kind."""
        cells = {_one_line(name): value for name, value in cells.items()}
        if step != self._last_step:
            self._last_step, self._last_rows, self._last_offset = step, {}, self._size()
        new_columns = [name for name in cells if name not in self._columns]
        is_new_row = kind not in self._last_rows
        row = self._last_rows.setdefault(kind, {"step": str(step), "kind": kind})
        row.update(cells)
        if new_columns:
            self._columns += new_columns
            self._replace(self._padded_lines(len(new_columns)))
        elif is_new_row:
            self._append(self._line(row))
        else:
            self._replace(self._kept_lines())

    def close(self) -> None:
        """Let go of the file, durably; closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _take_over(self, keeps: Callable[[int], bool]) -> None:
        """Continue the file that is there with the rows that stay; a line cut short by a kill does not."""
        rows: Iterator[_Row] = iter(())
        if self.path.exists() and self.path.stat().st_size:
            self._columns = _header(self.path)
            rows = (row for row in self._rows() if keeps(int(row["step"])))
        self._replace(self._merged_lines(rows))

    def _rows(self) -> Iterator[_Row]:
        with self.path.open(encoding="utf-8", newline="") as file:
            file.readline()
            for line in file:
                if line.endswith("\n"):
                    row = dict(zip(self._columns, line.rstrip("\r\n").split(","), strict=False))
                    if not row["step"].isdigit():
                        raise NoTableError(f"{self.path} is no table of metrics: a step is {row['step']!r}.")
                    yield row

    def _merged_lines(self, rows: Iterator[_Row]) -> Iterator[str]:
        """All lines but those of the last step, which stay in memory for `_replace` to add."""
        for row in rows:
            step = int(row["step"])
            if step != self._last_step:
                yield from map(self._line, self._last_rows.values())
                self._last_step, self._last_rows = step, {}
            merged = self._last_rows.setdefault(row["kind"], {})
            merged.update({name: cell for name, cell in row.items() if cell})

    def _kept_lines(self) -> Iterator[str]:
        """The lines before those of the last step, as they are.

        Raises:
            OnstepError: when the file is shorter than what was written here.
        """
        with self.path.open(encoding="utf-8", newline="") as file:
            position = len(file.readline().encode())
            while position < self._last_offset:
                line = file.readline()
                if not line:
                    raise OnstepError(
                        f"{self.path} ends at byte {position} instead of {self._last_offset}: something else has "
                        f"replaced it. Two writers cannot share a table; give each a path of its own."
                    )
                position += len(line.encode())
                yield line

    def _padded_lines(self, num_new: int) -> Iterator[str]:
        """The same, with empty cells for new columns."""
        return (line.rstrip("\n") + "," * num_new + "\n" for line in self._kept_lines())

    def _replace(self, lines: Iterator[str]) -> None:
        """Write the file anew: header, `lines`, and the rows of the last step."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(_csv_line(self._columns))
            file.writelines(lines)
            offset = file.tell()
            file.writelines(map(self._line, self._last_rows.values()))
        os.replace(temporary, self.path)
        self._last_offset = offset
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def _append(self, line: str) -> None:
        assert self._descriptor is not None
        size, data = self._size(), line.encode()
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise

    def _size(self) -> int:
        assert self._descriptor is not None
        return os.fstat(self._descriptor).st_size

    def _line(self, row: Mapping[str, str]) -> str:
        return ",".join(row.get(name, "") for name in self._columns) + "\n"


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        columns = next(csv.reader([file.readline()]), [])
    if columns[: len(KEYS)] != KEYS:
        raise NoTableError(f"{path} is no table of metrics: its columns begin with {columns[:2]} instead of {KEYS}.")
    return columns


def _csv_line(cells: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _one_line(name: str) -> str:
    """A column's name that cannot break the header into lines."""
    return " ".join(name.split())
