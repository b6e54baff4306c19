"""Writes the metrics of a run to a table, `metrics.csv`."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from onstep.errors import OnstepError
from onstep.files.durability import append_all, replacing
from onstep.record.names import numbered_name
from onstep.trackers.numbers import is_step
from onstep.trackers.tracker import CannotContinueError, RunIdentity

logger: logging.Logger = logging.getLogger(__name__)

KEYS = ["step", "kind"]
_Row = dict[str, str]


class NoTableError(OnstepError):
    """The file is not a table of metrics."""


class CsvTable:
    """A table with one row per (step, kind); cells added to a row of the last step are merged into it.

    A row is appended in one write. New columns and merges replace the file atomically, so neither a reader nor a kill
    ever sees a half-written table. The table is durable once closed, and at every checkpoint of the run.

    Args:
        path: The file; its directory must exist.
        num_rows: How many of the existing rows to keep.

    Raises:
        NoTableError: if the file is not a table of metrics, or has fewer rows.
    """

    def __init__(self, path: Path, num_rows: int = 0) -> None:
        self.path = path
        self.num_rows = num_rows
        self._columns = dict.fromkeys(KEYS)
        self._last_step: int | None = None
        self._last_rows: dict[str, _Row] = {}
        """The rows of the last step that was put, by kind."""
        self._last_offset = 0
        """Byte offset of these rows in the file."""
        self._descriptor: int | None = None
        self.is_in_checkpoint = path.exists()
        """Whether a checkpoint may rely on the rows, so that no replacement of the file must risk them."""
        if num_rows or (path.exists() and path.stat().st_size):
            self._columns = dict.fromkeys(_header(path))
            os.truncate(path, _end_of_rows(path, num_rows))
            self._open()
            self._last_offset = self._size()
        else:
            self._replace(iter(()))

    def put(self, step: int, kind: str, cells: Mapping[str, str]) -> None:
        """Add cells to the row of a step and kind, or leave the table as it is, if its disk refuses that."""
        with self._undone_on_error():
            self._put(step, kind, {_column(name): value for name, value in cells.items()})

    @contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """What is not in the file must not be in memory either."""
        rows = {kind: dict(row) for kind, row in self._last_rows.items()}
        before = (self.num_rows, self._columns, self._last_step, self._last_offset)
        try:
            yield
        except BaseException:
            self.num_rows, self._columns, self._last_step, self._last_offset = before
            self._last_rows = rows
            raise

    def _put(self, step: int, kind: str, cells: Mapping[str, str]) -> None:
        if step != self._last_step:
            self._last_step, self._last_rows, self._last_offset = step, {}, self._size()
        new_columns = [name for name in cells if name not in self._columns]
        is_new_row = kind not in self._last_rows
        row = self._last_rows.setdefault(kind, {"step": str(step), "kind": kind})
        row.update(cells)
        self._add_columns(new_columns)
        self.num_rows += is_new_row
        if is_new_row and not new_columns:
            self._append(self._line(row))
        else:
            self._replace(self._kept_lines("," * len(new_columns)))

    def expect(self, names: Iterable[str]) -> None:
        """Add columns in advance, so that the file need not be rewritten for each."""
        new_columns = [name for name in map(_column, names) if name not in self._columns]
        with self._undone_on_error():
            self._add_columns(new_columns)
            self._replace(self._kept_lines("," * len(new_columns)))

    def close(self) -> None:
        """Fsync and close the file; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _add_columns(self, names: Iterable[str]) -> None:
        self._columns = {**self._columns, **dict.fromkeys(names)}

    def _kept_lines(self, new_cells: str) -> Iterator[str]:
        """The lines before those of the last step, with cells for new columns.

        Raises:
            OnstepError: when the file is shorter than what was written.
        """
        with self.path.open(encoding="utf-8", newline="") as file:
            position = len(file.readline().encode())
            while position < self._last_offset:
                line = file.readline()
                if not line:
                    raise OnstepError(
                        f"{self.path} ends at byte {position} instead of {self._last_offset}: another writer has "
                        f"replaced it. Two writers cannot share a table; give each its own path."
                    )
                position += len(line.encode())
                yield line.rstrip("\n") + new_cells + "\n"

    def _replace(self, lines: Iterator[str]) -> None:
        """Rewrite the file: header, `lines`, and the rows of the last step."""
        with replacing(self.path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(self._columns)
            file.writelines(lines)
            offset = file.tell()
            file.writelines(map(self._line, self._last_rows.values()))
            file.flush()
            if self.is_in_checkpoint:
                os.fsync(file.fileno())  # after a power failure, the name must not refer to an empty file
        self._last_offset = offset
        self._open()

    def _open(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def _append(self, line: str) -> None:
        assert self._descriptor is not None
        append_all(self._descriptor, line.encode())

    def _size(self) -> int:
        assert self._descriptor is not None
        return os.fstat(self._descriptor).st_size

    def _line(self, row: Mapping[str, str]) -> str:
        return ",".join(row.get(name, "") for name in self._columns) + "\n"


def _column(name: str) -> str:
    """The name on one line, as the header requires."""
    return " ".join(name.encode("utf-8", errors="replace").decode("utf-8").split())


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        columns = next(csv.reader([file.readline()]), [])
    if columns[: len(KEYS)] != KEYS:
        raise NoTableError(f"{path} is not a table of metrics: its columns begin with {columns[:2]} instead of {KEYS}.")
    return columns


def _num_before(path: Path, step: int) -> int:
    """The number of leading rows of steps before `step`."""
    _header(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        file.readline()
        return sum(
            1 for _ in takewhile(lambda row: row.split(",")[0].isdecimal() and int(row.split(",")[0]) < step, file)
        )


def _num_lines(path: Path) -> int:
    """Up to 2 lines of a file."""
    with path.open("rb") as file:
        return sum(1 for _ in zip(file, range(2), strict=False))


def _end_of_rows(path: Path, num_rows: int) -> int:
    """Where the first `num_rows` rows end, in bytes."""
    with path.open("rb") as file:
        end = len(file.readline())
        for number in range(num_rows):
            line = file.readline()
            if not line.endswith(b"\n"):
                raise NoTableError(f"{path} has {number} rows instead of {num_rows}: its end is lost.")
            end += len(line)
    return end


class CsvTracker:
    """Writes one row per step and kind (train, eval, test): ``step,kind,timestamp,epoch,loss,...``.

    Columns have the metrics log's names; new ones are appended. NaN and infinities are written as ``nan``, ``inf`` and
    ``-inf``. A resumed run continues its file without the rows after its checkpoint; a new run moves an existing file
    to ``metrics.<n>.csv``. Texts are not written.

    Args:
        path: The file; None is ``metrics.csv`` in the run's directory.
    """

    name = "csv"
    package = None
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    place = "`metrics.csv` in the run directory"
    artifacts = ("metrics*.csv",)
    keeps_names = True
    takes_back = True

    def __init__(self, path: str | Path | None = None) -> None:
        self._given_path = None if path is None else Path(path)
        self._table: CsvTable | None = None
        self._num_rows = 0
        self.location: Path | None = self._given_path
        """Path of the file; None until the run's directory is known."""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Continue the file, or start a new one."""
        self.close("completed")
        self.location = path = self._given_path or run.directory / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.exists() and (not state or (state.get("rows") == 0 and _num_lines(path) > 1)):
                path.rename(numbered_name(path))  # also rows that are to be written again: the record may be gone
            num_rows = (
                state.get("rows", 0) if "rows" in state or not path.exists() else _num_before(path, state["step"])
            )
            if not is_step(num_rows):
                raise NoTableError(f"{path} cannot have {num_rows!r} rows.")
            self._table = CsvTable(path, num_rows)
        except (NoTableError, FileNotFoundError) as error:
            if path.exists():
                logger.warning("%s It was renamed to %s.", error, path.rename(numbered_name(path)))
            raise CannotContinueError(f"{path} cannot be continued: {error}") from error

    def expect(self, names: Iterable[str]) -> None:
        """Add columns for metrics in advance; otherwise, the file is rewritten when a new one appears."""
        if self._table is not None:
            self._table.expect(["timestamp", *sorted(names, key=lambda name: name != "epoch")])

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a row, or cells to the row of this step and kind."""
        if self._table is not None:
            names = sorted((name for name in metrics if name not in KEYS), key=lambda name: name != "epoch")
            cells = {"timestamp": repr(timestamp), **{name: repr(metrics[name]) for name in names}}
            kinds = [kind for kind in ("eval", "test") if any(name.startswith(f"{kind}_") for name in metrics)]
            self._table.put(step, kinds[0] if kinds else "train", cells)

    def text(self, tag: str, text: str, step: int) -> None:
        """Ignore texts: a table of numbers cannot hold them."""

    def local_files(self) -> list[Path]:
        """The file."""
        if self._table is not None:
            self._table.is_in_checkpoint = True
        return [] if self.location is None else [self.location]

    def state_dict(self) -> dict[str, Any]:
        """The number of rows; the file contains all other state."""
        if self._table is not None:
            self._num_rows = self._table.num_rows
        return {"rows": self._num_rows}

    def close(self, status: str) -> None:
        """Close the file."""
        table, self._table = self._table, None
        if table is not None:
            table.close()
