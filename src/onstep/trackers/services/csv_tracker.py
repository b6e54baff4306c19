"""Writes the metrics of a run as a table, `metrics.csv`."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from onstep.errors import OnstepError
from onstep.metrics_log import numbered_name
from onstep.trackers.tracker import RunIdentity

logger: logging.Logger = logging.getLogger(__name__)

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
        rows: Iterator[_Row] = iter(())
        if path.exists() and path.stat().st_size:
            self._columns = _header(path)
            rows = (row for row in self._rows() if keeps(int(row["step"])))
        self._replace(self._merged_lines(rows))

    def put(self, step: int, kind: str, cells: Mapping[str, str]) -> None:
        """Add cells to the row of a step and kind."""
        cells = {" ".join(name.split()): value for name, value in cells.items()}  # no name breaks the header
        if step != self._last_step:
            self._last_step, self._last_rows, self._last_offset = step, {}, self._size()
        new_columns = [name for name in cells if name not in self._columns]
        is_new_row = kind not in self._last_rows
        row = self._last_rows.setdefault(kind, {"step": str(step), "kind": kind})
        row.update(cells)
        self._columns += new_columns
        if is_new_row and not new_columns:
            self._append(self._line(row))
        else:
            self._replace(self._kept_lines("," * len(new_columns)))

    def close(self) -> None:
        """Let go of the file, durably; closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _rows(self) -> Iterator[_Row]:
        """The rows that are there; a line cut short by a kill is not one."""
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

    def _kept_lines(self, new_cells: str) -> Iterator[str]:
        """The lines before those of the last step, with cells for new columns.

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
                yield line.rstrip("\n") + new_cells + "\n"

    def _replace(self, lines: Iterator[str]) -> None:
        """Write the file anew: header, `lines`, and the rows of the last step."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(self._columns)
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


class CsvSink:
    """Writes one row for each step and kind (train, eval, test): ``step,kind,timestamp,epoch,loss,...``.

    The columns have the journal's names; one that first appears later is added at the end. NaN and the infinities are
    written as ``nan``, ``inf`` and ``-inf``. A run that continues goes on in its file, without the rows after its
    checkpoint; a fresh run moves the file that is there to ``metrics.<n>.csv``. Texts have no place in a table and are
    left out.

    Args:
        path: The file; None is ``metrics.csv`` in the run's folder.
    """

    name = "csv"
    keeps_names = True
    takes_back = True

    def __init__(self, path: str | Path | None = None) -> None:
        self._given_path = None if path is None else Path(path)
        self._table: CsvTable | None = None
        self.location: Path | None = self._given_path
        """The file; None until the run's folder is known."""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Continue the file, or begin one."""
        self.close("completed")
        self.location = path = self._given_path or run.folder / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and run.start_step == 0 and not run.adds_only:
            path.rename(numbered_name(path))

        def keeps(step: int) -> bool:
            return run.adds_only or step < run.first_open_step

        try:
            self._table = CsvTable(path, keeps)
        except NoTableError as error:
            logger.warning("%s It is kept as %s.", error, path.rename(numbered_name(path)))
            self._table = CsvTable(path, keeps)
        for point in () if run.adds_only else run.last_points:
            self.log(point.metrics, point.step, point.timestamp)

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a row, or cells to the row of this step and kind."""
        if self._table is not None:
            names = sorted((name for name in metrics if name not in KEYS), key=lambda name: name != "epoch")
            cells = {"timestamp": repr(timestamp), **{name: repr(metrics[name]) for name in names}}
            kinds = [kind for kind in ("eval", "test") if any(name.startswith(f"{kind}_") for name in metrics)]
            self._table.put(step, kinds[0] if kinds else "train", cells)

    def text(self, tag: str, text: str, step: int) -> None:
        """Nothing: a table of numbers has no place for it."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the file tells all."""
        return {}

    def close(self, status: str) -> None:
        """Let go of the file."""
        table, self._table = self._table, None
        if table is not None:
            table.close()
