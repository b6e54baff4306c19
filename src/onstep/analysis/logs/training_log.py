"""The log of one run: its records, its columns of numbers, and what can be asked of them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.files import FILE_NAME, name_of_place, names_in_path
from onstep.analysis.logs.reading import read_log
from onstep.analysis.logs.record_file import ListColumns, RecordFile
from onstep.errors import ConfigError
from onstep.metrics_log import Record

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TrainingLog:
    """The log of one run, also of one that is going on or was killed.

    Columns (`column`, `has`, `keys`) are arrays that are filled while the file is read once, so that a log of a million
    records can be summed up in seconds and in less memory than its size; `records` decodes what it is asked for. This
    holds for files with one record a line, as journals have; a file of another layout (indented, all on one line) is
    decoded as a whole, which takes several times its size in memory.

    Where the path has a part ``runs``, the part after it names the run, and the part before it the model
    (``output_models/<model>/runs/<run>/trainer_logs.json``); a run that stands in a plain ``runs/<run>/`` has no model.
    """

    log_path: Path
    records: Sequence[Record]
    """Lazily decoded: iterating and indexing give dictionaries."""
    run_name: str | None = None
    model_name: str | None = None
    label: str | None = None
    """What legends and tables call the log; None: see `get_label`."""
    notes: list[str] = field(default_factory=list)
    """What had to be recovered, in words; empty for a whole file. Reading values may find more."""

    def __post_init__(self) -> None:
        self.log_path = Path(self.log_path)
        run_name, model_name = names_in_path(self.log_path)
        self.run_name = run_name if self.run_name is None else self.run_name
        self.model_name = model_name if self.model_name is None else self.model_name
        self._columns = self.records if isinstance(self.records, RecordFile) else ListColumns(self.records)

    @classmethod
    def from_file(cls, log_path: str | Path) -> TrainingLog:
        """Read a journal, JSON lines, or the `trainer_state.json` of Hugging Face's Trainer.

        What can be read of a damaged file is read; `notes` says what was left out.

        Raises:
            FileNotFoundError: when there is no such file.
            DataError: a ValueError; when nothing can be read, or the file holds something other than records.
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
        """Read the `trainer_logs.json` of a run's folder; raises what `from_file` raises."""
        return cls.from_file(Path(run_dir) / FILE_NAME)

    @property
    def num_records(self) -> int:
        """How many records the log has."""
        return len(self.records)

    def get_label(self, index: int = 0) -> str:
        """`label`, else the model's name, else the run's, else ``Run <index + 1>``.

        Two runs of a model share that name: `distinct_labels` tells several logs apart.
        """
        return self.label or self.model_name or self.run_name or f"Run {index + 1}"

    def keys(self) -> list[str]:
        """All keys of the records, in the order in which they first appear."""
        return self._columns.keys()

    def column(self, key: str) -> NDArray[np.float64]:
        """The numbers under `key`, shape (num_records,), read-only; NaN where a record has no number there."""
        return self._columns.column(key)

    def has(self, key: str) -> NDArray[np.bool_]:
        """Which records have `key`, whatever its value, shape (num_records,), read-only."""
        return self._columns.has(key)

    def load_columns(self, keys: Iterable[str]) -> None:
        """Have several columns at hand, as `column` has one once it was asked for it."""
        for key in keys:
            self.column(key)

    def blocks(self, keys: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
        """The decoded values under the keys, some thousand records at a time; None where a record lacks the key."""
        return self._columns.blocks(keys)

    @property
    def is_training(self) -> NDArray[np.bool_]:
        """Which records tell of training: they have `loss` and no `eval_loss`."""
        return self.has("loss") & ~self.has("eval_loss")

    @property
    def is_evaluation(self) -> NDArray[np.bool_]:
        """Which records tell of an evaluation: they have `eval_loss`."""
        return self.has("eval_loss")

    def get_training_records(self) -> list[Record]:
        """The records with `loss` and without `eval_loss`."""
        return self._decoded(self.is_training)

    def get_eval_records(self) -> list[Record]:
        """The records with `eval_loss`."""
        return self._decoded(self.is_evaluation)

    def get_final_record(self) -> Record | None:
        """The last record with `train_runtime`: the final metrics; None while the run goes on."""
        rows = np.flatnonzero(self.has("train_runtime"))
        return self.records[int(rows[-1])] if len(rows) else None

    def get_metric_values(self, metric: str, records: Sequence[Record] | None = None) -> list[Any]:
        """The values of the records that have `metric`.

        Args:
            metric: The key.
            records: Where to look; None: all records. Records without the key are passed over, so two such lists do
                not belong together row by row: filter the records first, or use `column`.
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
        """`timestamp` (unix seconds) of each record that has it; see `get_metric_values`."""
        return self.get_metric_values("timestamp", records)

    def get_points(self, metric: str, x: str = "global_step") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """`x` and `metric` of the records that have both, row by row: two arrays of one length; `metric` may be NaN."""
        across, up = self.column(x), self.column(metric)
        belongs = self.has(metric) & ~np.isnan(across)
        return across[belongs], up[belongs]

    def find_best_step(self, metric: str, mode: str = "min") -> tuple[int, float] | None:
        """Step and value of the best record of `metric`; None where no record has a number that is not NaN.

        Args:
            metric: The key.
            mode: "min" or "max": which values are the better ones.

        Raises:
            ConfigError: for another mode.
            KeyError: when the best record has no `global_step`.
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
    """A label for each log that no other of them has, for legends and tables.

    A log without a label or a name in its path is called as its folder or file. Logs of one label are told apart by
    ``<model>/<run>``, and where that is not enough by a number.
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
    """The label with the run's name; that of a place with the folder above it."""
    if not is_named:
        return name_of_place(log.log_path, 1)
    return label if log.run_name is None or log.run_name == label else f"{label}/{log.run_name}"


def natural_order(logs: Sequence[TrainingLog]) -> list[TrainingLog]:
    """The runs with lr2 before lr10, where they came in the order of the alphabet, as a shell lists files.

    Any other order is somebody's choice and stays.
    """
    paths = [log.log_path.parts for log in logs]
    if paths != sorted(paths):
        return list(logs)
    return sorted(logs, key=lambda log: _key(str(log.log_path)))


def _key(text: str) -> list[tuple[int, int, str]]:
    """Numbers by their value, before letters."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]
