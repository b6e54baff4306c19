"""Writes the metrics of a run to a table, `metrics.csv`."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from onstep.errors import OnstepError
from onstep.record.names import numbered_name
from onstep.trackers.points import is_step
from onstep.trackers.tracker import RunIdentity

logger: logging.Logger = logging.getLogger(__name__)

KEYS = ["step", "kind"]
_Row = dict[str, str]


MARK_ROWS = 8192
"""Rows between two marks: more than a run logs in the seconds before a checkpoint, which may be written again."""
_MARK_BYTES = 512


class Mark(NamedTuple):
    """A place in a table, before the rows of a step; all rows before it are of lower steps."""

    step: int
    offset: int
    """In bytes."""
    digest: str | None
    """Of what precedes it."""


class NoTableError(OnstepError):
    """The file is not a table of metrics."""


class CsvTable:
    """A table with one row per (step, kind); cells added to a row of the last step are merged into it.

    A row is appended in one write. New columns and merges replace the file atomically, so neither a reader nor a kill
    ever sees a half-written table. The table is durable once closed, and at every checkpoint of the run.

    Args:
        path: The file; its directory must exist.
        keeps: Whether to keep the existing rows of a step.
        marks: The marks of the table that wrote the file; the rows before a mark are not read again.

    Raises:
        NoTableError: if the file is not a table of metrics.
    """

    def __init__(self, path: Path, keeps: Callable[[int], bool], marks: Sequence[Mark] = ()) -> None:
        self.path = path
        self.marks: tuple[Mark, ...] = ()
        """The last two places from which the file can be continued; each is `MARK_ROWS` rows after the one before."""
        self._num_unmarked = 0
        """Rows since the last mark."""
        self._highest_step = -1
        self._columns = dict.fromkeys(KEYS)
        self._last_step: int | None = None
        self._last_rows: dict[str, _Row] = {}
        """The rows of the last step, by kind."""
        self._last_offset = 0
        """Byte offset of these rows in the file."""
        self._descriptor: int | None = None
        self.is_in_checkpoint = path.exists()
        """Whether a checkpoint may rely on the rows, so that no replacement of the file must risk them."""
        rows: Iterator[_Row] = iter(())
        if path.exists() and path.stat().st_size:
            self._columns = dict.fromkeys(_header(path))
            if any(self._continue_at(mark, keeps) for mark in reversed(marks)):
                return
            rows = (row for row in self._rows() if keeps(int(row["step"])))
        self._replace(self._merged_lines(rows))

    def put(self, step: int, kind: str, cells: Mapping[str, str]) -> None:
        """Add cells to the row of a step and kind."""
        cells = {_column(name): value for name, value in cells.items()}
        if step != self._last_step:
            self._last_step, self._last_rows, self._last_offset = step, {}, self._size()
            self._mark(step)
        new_columns = [name for name in cells if name not in self._columns]
        is_new_row = kind not in self._last_rows
        row = self._last_rows.setdefault(kind, {"step": str(step), "kind": kind})
        row.update(cells)
        self._add_columns(new_columns)
        self._num_unmarked += is_new_row
        if is_new_row and not new_columns:
            self._append(self._line(row))
        else:
            self._replace(self._kept_lines("," * len(new_columns)))

    def expect(self, names: Iterable[str]) -> None:
        """Add columns in advance, so that the file need not be rewritten for each."""
        new_columns = [name for name in map(_column, names) if name not in self._columns]
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

    def _rows(self) -> Iterator[_Row]:
        """The existing rows, without a line truncated by a kill."""
        with self.path.open(encoding="utf-8", newline="") as file:
            file.readline()
            for line in file:
                if line.endswith("\n"):
                    yield self._row(line)

    def _row(self, line: str) -> _Row:
        row = dict(zip(self._columns, line.rstrip("\r\n").split(","), strict=False))
        if len(row) < len(KEYS) or not row["step"].isdecimal():
            raise NoTableError(f"{self.path} is not a table of metrics: a row begins with {line[:40]!r}.")
        return row

    def _mark(self, step: int) -> None:
        """Mark the place before the rows of a new step, if the steps before it are lower."""
        if step > self._highest_step and self._num_unmarked >= MARK_ROWS:
            self.marks = (*self.marks[-1:], Mark(step, self._last_offset, self._digest_before(self._last_offset)))
            self._num_unmarked = 0
        self._highest_step = max(self._highest_step, step)

    def _add_columns(self, names: Iterable[str]) -> None:
        for name in names:
            self._columns[name] = None
            self.marks = ()  # all rows move

    def _continue_at(self, mark: Mark, keeps: Callable[[int], bool]) -> bool:
        """Drop the rows that are not kept, and open the file, reading no rows before a mark.

        Returns:
            False, with nothing changed, if all rows must be read: there is no row to keep after the mark, those after
            it are not in the order of their steps, or the file is not the one that was marked.
        """
        if not keeps(mark.step) or self._digest_before(mark.offset) != mark.digest:
            return False
        with self.path.open("rb") as file:
            file.seek(mark.offset)
            lines = [line for line in file if line.endswith(b"\n")]
        rows = [self._row(line.decode()) for line in lines]
        steps = [int(row["step"]) for row in rows]
        num_kept = sum(map(keeps, steps))
        kept = [(step, row.get("kind")) for step, row in zip(steps, rows, strict=True)][:num_kept]
        is_in_order = steps[:1] == [mark.step] and all(one[0] <= next_one[0] for one, next_one in pairwise(kept))
        if not is_in_order or len(set(kept)) < num_kept or not all(keeps(step) for step, _ in kept):
            return False
        self._last_step = steps[num_kept - 1]
        first = steps.index(self._last_step)
        last = [{name: cell for name, cell in row.items() if cell} for row in rows[first:num_kept]]
        self._last_rows = {row["kind"]: row for row in last}
        self._last_offset = mark.offset + sum(map(len, lines[:first]))
        self.marks, self._num_unmarked, self._highest_step = (mark,), num_kept, self._last_step
        os.truncate(self.path, self._last_offset + sum(map(len, lines[first:num_kept])))
        self._open()
        return True

    def _digest_before(self, offset: int) -> str | None:
        """A digest of the header and of the last bytes before an offset; None if the file is shorter."""
        with self.path.open("rb") as file:
            header = file.readline()
            start = max(offset - _MARK_BYTES, 0)
            file.seek(start)
            before = file.read(offset - start)
        return blake2b(header + before, digest_size=8).hexdigest() if len(before) == offset - start else None

    def _merged_lines(self, rows: Iterator[_Row]) -> Iterator[str]:
        """All lines except those of the last step, which are kept in memory for `_replace`."""
        for row in rows:
            step = int(row["step"])
            if step != self._last_step:
                yield from map(self._line, self._last_rows.values())
                self._last_step, self._last_rows = step, {}
                self._highest_step = max(self._highest_step, step)
            merged = self._last_rows.setdefault(row["kind"], {})
            merged.update({name: cell for name, cell in row.items() if cell})

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
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(self._columns)
            file.writelines(lines)
            offset = file.tell()
            file.writelines(map(self._line, self._last_rows.values()))
            file.flush()
            if self.is_in_checkpoint:
                os.fsync(file.fileno())  # after a power failure, the name must not refer to an empty file
        os.replace(temporary, self.path)
        self._last_offset = offset
        self._open()

    def _open(self) -> None:
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


def _column(name: str) -> str:
    """The name on one line, as the header requires."""
    return " ".join(name.encode("utf-8", errors="replace").decode("utf-8").split())


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        columns = next(csv.reader([file.readline()]), [])
    if columns[: len(KEYS)] != KEYS:
        raise NoTableError(f"{path} is not a table of metrics: its columns begin with {columns[:2]} instead of {KEYS}.")
    return columns


def saved_marks(state: Mapping[str, Any]) -> list[Mark]:
    """The marks in a checkpoint's state, oldest first; what is not a mark is ignored: all rows are read then."""
    marks = state.get("marks")
    return [Mark(*one) for one in marks if _is_mark(one)] if isinstance(marks, list) else []


def _is_mark(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != len(Mark._fields):
        return False
    return is_step(value[0]) and is_step(value[1]) and isinstance(value[2], str)


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
        self._marks: tuple[Mark, ...] = ()
        self.location: Path | None = self._given_path
        """Path of the file; None until the run's directory is known."""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Continue the file, or start a new one."""
        self.close("completed")
        self.location = path = self._given_path or run.directory / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and run.start_step == 0 and not run.adds_only:
            path.rename(numbered_name(path))

        def keeps(step: int) -> bool:
            return run.adds_only or step < run.first_open_step

        try:
            self._table = CsvTable(path, keeps, saved_marks(state))
        except NoTableError as error:
            logger.warning("%s It was renamed to %s.", error, path.rename(numbered_name(path)))
            self._table = CsvTable(path, keeps)
        for point in () if run.adds_only else run.last_points:
            self.log(point.metrics, point.step, point.timestamp)

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
        """Where the file can be continued without reading all of it; the file contains all other state."""
        if self._table is not None:
            self._marks = self._table.marks
        return {"marks": [list(mark) for mark in self._marks]} if self._marks else {}

    def close(self, status: str) -> None:
        """Close the file."""
        table, self._table = self._table, None
        if table is not None:
            table.close()
