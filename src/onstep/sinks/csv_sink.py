"""Writes the metrics of a run as a table, `metrics.csv`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from onstep.sinks.csv_table import KEYS, CsvTable, NoTableError
from onstep.sinks.metric_sink import RunIdentity

logger: logging.Logger = logging.getLogger(__name__)


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
            _set_aside(path)
        self._table = _table(path, run)
        if not run.adds_only:
            for point in run.last_points:
                self.log(point.metrics, point.step, point.timestamp)

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a row, or cells to the row of this step and kind."""
        if self._table is not None:
            cells = {name: repr(value) for name, value in metrics.items() if name not in KEYS}
            self._table.put(step, _kind_of(metrics), {"timestamp": repr(timestamp), **_epoch_first(cells)})

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


def _table(path: Path, run: RunIdentity) -> CsvTable:
    """The table at `path` with the rows that count; a file that is no table is moved aside."""

    def keeps(step: int) -> bool:
        return run.adds_only or step < run.first_open_step

    try:
        return CsvTable(path, keeps)
    except NoTableError as error:
        logger.warning("%s It is kept as %s.", error, _set_aside(path))
        return CsvTable(path, keeps)


def _set_aside(path: Path) -> Path:
    """Rename to ``<name>.<n>.csv``, the first number that is free."""
    free = next(name for n in count(1) if not (name := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
    os.replace(path, free)
    return free


def _kind_of(metrics: Mapping[str, float]) -> str:
    for kind in ("eval", "test"):
        if any(name.startswith(f"{kind}_") for name in metrics):
            return kind
    return "train"


def _epoch_first(cells: dict[str, str]) -> dict[str, str]:
    return {name: cells[name] for name in sorted(cells, key=lambda name: name != "epoch")}
