"""Defines `TrainingLog`, the log of one run: its records, columns of numbers, and queries on them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.columns import Columns
from onstep.analysis.logs.files import log_in, name_of_place, names_in_path
from onstep.analysis.logs.reading import read_log
from onstep.analysis.logs.record_file import RecordFile
from onstep.errors import ConfigError
from onstep.record import Record

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainingLog:
    """The log of one run, which may be finished, running or killed.

    Columns (`column`, `has`, `keys`) are arrays filled while the file is read once, so a log of a million records
    can be summarized in seconds, with less memory than its size; `records` are decoded on access. This applies to files
    with one record per line, such as metrics logs; other layouts (indented, all on one line) are decoded as a whole,
    which needs several times their size in memory.

    If the path contains ``runs``, the next part is the name of the run, and the previous one that of the model
    (``output_models/<model>/runs/<run>/trainer_logs.json``); a run in a plain ``runs/<run>/`` has no model.
    """

    log_path: Path
    """The file that was read."""
    records: Sequence[Record] = field(default_factory=list)
    """Decoded lazily: iterating and indexing return dictionaries."""
    run_name: str | None = None
    """The name of the run."""
    model_name: str | None = None
    """The name of the model, if the run records one."""
    label: str | None = None
    """Name of the log in legends and tables; None: see `get_label`."""
    notes: list[str] = field(default_factory=list)
    """Remarks on what had to be recovered; empty for an intact file. Reading values may add more."""

    def __post_init__(self) -> None:
        self.log_path = Path(self.log_path)
        run_name, model_name = names_in_path(self.log_path)
        self.run_name = run_name if self.run_name is None else self.run_name
        self.model_name = model_name if self.model_name is None else self.model_name

    @classmethod
    def from_file(cls, log_path: str | Path) -> TrainingLog:
        """Read a metrics log, JSON lines, or the `trainer_state.json` of Hugging Face's Trainer.

        Damaged files are read as far as possible; `notes` lists what was skipped.

        Args:
            log_path: a metrics log, or a `trainer_state.json` of Hugging Face's Trainer.

        Raises:
            FileNotFoundError: if the file does not exist.
            DataError: a ValueError; if nothing can be read, or the file does not contain records.
        """
        path = Path(log_path)
        if not path.exists():
            raise FileNotFoundError(f"Log file not found: {path}")
        records, notes = read_log(path)
        for note in notes:
            logger.warning("%s: %s", path, note)
        return cls(path, records, notes=notes)

    @classmethod
    def from_run_dir(cls, run_dir: str | Path) -> TrainingLog:
        """Read the metrics log in a run's directory, or else its record; raises the same errors as `from_file`.

        Args:
            run_dir: the directory of a run.
        """
        return cls.from_file(log_in(Path(run_dir)))

    @cached_property
    def columns(self) -> Columns:
        """The numbers of the records by key."""
        return self.records.columns if isinstance(self.records, RecordFile) else Columns(self.records)

    @property
    def num_records(self) -> int:
        """Number of records."""
        return len(self.records)

    def get_label(self, index: int = 0) -> str:
        """`label`, else the model's name, else the run's, else ``Run <index + 1>``.

        Runs of the same model share that label; use `distinct_labels` for several logs.
        """
        return self.label or self.model_name or self.run_name or f"Run {index + 1}"

    def keys(self) -> list[str]:
        """All keys of the records, in order of first appearance."""
        return self.columns.keys()

    def column(self, key: str) -> NDArray[np.float64]:
        """The numbers of `key`, shape (num_records,), read-only; NaN where a record has no number."""
        return self.columns.column(key)

    def has(self, key: str) -> NDArray[np.bool_]:
        """Mask of the records that have `key` with any value, shape (num_records,), read-only."""
        return self.columns.has(key)

    def load_columns(self, keys: Iterable[str]) -> None:
        """Load several columns, which are then cached as by `column`."""
        for key in keys:
            self.column(key)

    def blocks(self, keys: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        """The decoded values of the keys, a few thousand records at a time; None where a record lacks the key."""
        for records in self.records.blocks() if isinstance(self.records, RecordFile) else [self.records]:
            yield {key: [record.get(key) for record in records] for key in keys}

    @property
    def is_training(self) -> NDArray[np.bool_]:
        """Mask of the training records: those with `loss` and without `eval_loss`."""
        return self.has("loss") & ~self.has("eval_loss")

    @property
    def is_evaluation(self) -> NDArray[np.bool_]:
        """Mask of the evaluation records: those with `eval_loss`."""
        return self.has("eval_loss")

    def get_training_records(self) -> list[Record]:
        """The records with `loss` and without `eval_loss`."""
        return self._decoded(self.is_training)

    def get_eval_records(self) -> list[Record]:
        """The records with `eval_loss`."""
        return self._decoded(self.is_evaluation)

    def get_final_record(self) -> Record | None:
        """The last record with `train_runtime`, which contains the final metrics; None while the run is running."""
        rows = np.flatnonzero(self.has("train_runtime"))
        return self.records[int(rows[-1])] if len(rows) else None

    def get_metric_values(self, metric: str, records: Sequence[Record] | None = None) -> list[Any]:
        """The values of the records that have `metric`.

        Args:
            metric: The key.
            records: Records to search; None: all. Records without the key are skipped, so two such lists do not
                correspond row by row: filter the records first, or use `column`.
        """
        if records is None:
            records = self._decoded(self.has(metric))
        return [record[metric] for record in records if metric in record]

    def get_steps(self, records: Sequence[Record] | None = None) -> list[int]:
        """`global_step` of each record that has it; see `get_metric_values` and `get_points`."""
        return self.get_metric_values("global_step", records)

    def get_epochs(self, records: Sequence[Record] | None = None) -> list[float]:
        """`epoch` of each record that has it; see `get_metric_values`."""
        return self.get_metric_values("epoch", records)

    def get_timestamps(self, records: Sequence[Record] | None = None) -> list[float]:
        """`timestamp` (Unix seconds) of each record that has it; see `get_metric_values`."""
        return self.get_metric_values("timestamp", records)

    def get_points(self, metric: str, x: str = "global_step") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """`x` and `metric` of the records that have both: two arrays of the same length; `metric` may be NaN."""
        across, up = self.column(x), self.column(metric)
        belongs = self.has(metric) & ~np.isnan(across)
        return across[belongs], up[belongs]

    def find_best_step(self, metric: str, mode: str = "min") -> tuple[int, float] | None:
        """Step and value of the best record of `metric`; None if all values are missing or NaN.

        Args:
            metric: The key.
            mode: "min" or "max": which values are better.

        Raises:
            ConfigError: for an unknown mode.
            KeyError: if the best record has no `global_step`.
        """
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', got {mode!r}.")
        values = self.column(metric)
        if len(values) == 0 or np.isnan(values).all():
            return None
        row = int(np.nanargmin(values) if mode == "min" else np.nanargmax(values))
        step = float(self.column("global_step")[row])
        if math.isnan(step):
            raise KeyError("global_step")
        return int(step), float(values[row])

    def _decoded(self, chosen: NDArray[np.bool_]) -> list[Record]:
        if chosen.all():
            return list(self.records)
        return [self.records[int(row)] for row in np.flatnonzero(chosen)]


def distinct_labels(logs: Sequence[TrainingLog]) -> list[str]:
    """A unique label for each log, for legends and tables.

    A log without a label or a name in its path is named after its directory or file. Logs with the same label are
    distinguished by ``<model>/<run>`` and, if that is not enough, by a number.

    Args:
        logs: the logs, in the order of the legend.
    """
    is_named = [bool(log.label or log.model_name or log.run_name) for log in logs]
    labels = [
        log.get_label(index) if named else name_of_place(log.log_path)
        for index, (log, named) in enumerate(zip(logs, is_named, strict=True))
    ]
    labels = [
        _longer(log, label, named) if labels.count(label) > 1 else label
        for log, label, named in zip(logs, labels, is_named, strict=True)
    ]
    taken: set[str] = set()
    for index, label in enumerate(labels):
        numbered = (f"{label} ({number})" for number in count(2))
        labels[index] = next(name for name in chain([label], numbered) if name not in taken)
        taken.add(labels[index])
    return labels


def _longer(log: TrainingLog, label: str, is_named: bool) -> str:
    """The label with the run's name; for a path-based label, with the directory above."""
    if not is_named:
        return name_of_place(log.log_path, 1)
    return label if log.run_name is None or log.run_name == label else f"{label}/{log.run_name}"


def natural_order(logs: Sequence[TrainingLog]) -> list[TrainingLog]:
    """Sort alphabetically ordered runs, as from a shell's glob, in natural order: lr2 before lr10.

    Any other order was chosen by the user and is kept.
    """
    paths = [log.log_path.parts for log in logs]
    if paths != sorted(paths):
        return list(logs)
    return sorted(logs, key=lambda log: _key(str(log.log_path)))


def _key(text: str) -> list[tuple[int, int, str]]:
    """Sort key: numbers by value, before letters."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]
