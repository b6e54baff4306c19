"""Records every logged step, evaluation and test of a run in `trainer_logs.json`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onstep.events import TrainerCallback
from onstep.journal import Journal, JournalHeldError, align, encode, fork, numbered_name, read_records, set_aside

logger: logging.Logger = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Records that wait in memory for room on the disk; of more, the oldest are lost."""

FILE_NAME = "trainer_logs.json"
_INFO_KEY = "experiment_info"


class JsonLogger(TrainerCallback):
    """Appends a record to ``<args.logging_dir>/trainer_logs.json`` at every `on_log`, `on_evaluate` and `on_predict`.

    A record is ``{"timestamp": <unix seconds>, "global_step": ..., "epoch": ...}`` and the reported metrics, which win
    over those three. The file is valid JSON after every record, whatever happens to the process. The first record of a
    journal has the constructor's keyword arguments under ``"experiment_info"``; it has no `loss`.

    A run that continues (with this callback's state from a checkpoint, or at a step > 0) continues its journal; what
    was recorded after the checkpoint is kept aside in ``trainer_logs.branch-<n>.json``. A run that starts from another
    run's checkpoint begins with that run's records. A run that begins where a journal exists moves that one to
    ``trainer_logs.<n>.json``. An evaluation without training adds to the journal there is. A file that is no journal is
    renamed, never overwritten. Where another live run writes the file, this one takes the next
    ``trainer_logs.<n>.json``. Without `args.logging_dir` nothing is recorded.

    Args:
        **kwargs: Anything to record about the experiment when training starts.
    """

    ranks = "main"

    def __init__(self, **kwargs: Any) -> None:
        self.experiment_info = kwargs
        self._journal: Journal | None = None
        self._path: Path | None = None
        """The journal of this run, also while it is closed."""
        self._last_step = -1
        """Step of the last record; -1 before the first."""
        self._resume_step: int | None = None
        """Step of the last record when the checkpoint was saved that training is about to continue from."""
        self._unwritten: list[dict[str, Any]] = []
        self._num_records: int | None = 0
        """Records of the open journal; when continuing, those that the checkpoint covers (None: it does not say)."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the journal, cut to the step that training continues from."""
        target = _target(args)
        if not state.is_world_process_zero or target is None:
            return
        self._close()
        path = self._path_to_train(target)
        try:
            self._make_ready(path, state.global_step)
            self._open(path)
        except JournalHeldError as error:
            self._open_own(path, error)
        self._resume_step = None
        self._record_experiment_info(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Record a logged step, or the final metrics."""
        self._record(args, state, logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Record an evaluation."""
        self._record(args, state, metrics)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Record a test."""
        self._record(args, state, metrics)

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the journal; a later evaluation opens it again."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the journal's path, the step of its last record (-1 before the first), and how many.

        What was recorded later, even at the same step, does not belong to the checkpoint.
        """
        return {
            "log_path": None if self._path is None else str(self._path),
            "last_step": self._last_step,
            "num_records": self._num_records,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's journal when training begins; while training, go back to the checkpoint at once."""
        goes_back = self._journal is not None
        self._close()
        log_path = state_dict["log_path"]
        self._path = None if log_path is None else Path(log_path)
        self._last_step = self._resume_step = state_dict["last_step"]
        self._num_records = state_dict.get("num_records")
        if self._path is None:
            self._resume_step = None
        elif goes_back:
            self._make_ready(self._path, self._last_step)
            self._open(self._path)
            self._resume_step = None

    def _path_to_train(self, target: Path) -> Path:
        if self._resume_step is None or self._path is None:
            return target
        if not self._path.exists():
            logger.warning("%s, the journal to continue, is gone; recording in %s", self._path, target)
            self._num_records = None
            return target
        if self._path.resolve() != target.resolve() and (self._path.parent / "run.json").exists():
            return self._fork(self._path, target)
        return self._path

    def _fork(self, path: Path, target: Path) -> Path:
        """Take over the records of the run that the checkpoint is of, and leave that run's journal alone."""
        if target.exists():
            set_aside(target)
        fork(path, target, num_records=self._num_records)
        logger.info("%s begins with the records of %s", target, path)
        return target

    def _make_ready(self, path: Path, step: int) -> None:
        """Leave at `path` what a run at `step` continues, or nothing."""
        if not path.exists():
            return
        if self._resume_step is not None:
            last_step = max(step, self._resume_step) if self._num_records is None else None
            aside = align(path, last_step, num_records=self._num_records)
        elif step > 0 or self._is_own_beginning(path):
            aside = align(path, step)
        else:
            aside = set_aside(path)
        if aside is not None:
            logger.warning("%s: what this run does not continue is kept in %s", path, aside)

    def _is_own_beginning(self, path: Path) -> bool:
        """Whether the journal holds no more than an evaluation by this callback before training."""
        return path == self._path and self._last_step <= 0

    def _open(self, path: Path) -> None:
        self._journal = Journal.open(path)
        self._path = path
        self._num_records = len(read_records(path))

    def _open_own(self, path: Path, error: JournalHeldError) -> None:
        own = numbered_name(path)
        logger.warning("%s Recording in %s.", error, own)
        self._open(own)

    def _record_experiment_info(self, state: Any) -> None:
        """Once a journal, and again where a continued run has other arguments."""
        assert self._path is not None
        recorded = [record[_INFO_KEY] for record in read_records(self._path) if _INFO_KEY in record]
        if self.experiment_info and [encode(self.experiment_info)] != [encode(info) for info in recorded[-1:]]:
            self._append(state, {_INFO_KEY: self.experiment_info})

    def _record(self, args: Any, state: Any, metrics: Mapping[str, Any]) -> None:
        target = _target(args)
        if not state.is_world_process_zero or target is None:
            return
        if self._journal is None:
            path = self._path if self._path is not None and self._path.exists() else target
            try:
                self._open(path)
            except JournalHeldError as error:
                self._open_own(path, error)
        self._append(state, metrics)

    def _append(self, state: Any, metrics: Mapping[str, Any]) -> None:
        assert self._journal is not None
        head = {"timestamp": time.time(), "global_step": state.global_step, "epoch": state.epoch}
        self._unwritten.append({**head, **metrics})
        self._last_step = state.global_step
        self._write_what_waits()

    def _write_what_waits(self) -> None:
        """Append what is not in the journal yet; a full disk costs a warning, and the records wait for room."""
        assert self._journal is not None
        had_to_wait = len(self._unwritten) > 1
        try:
            while self._unwritten:
                self._journal.append(self._unwritten[0])
                del self._unwritten[0]
                self._num_records = (self._num_records or 0) + 1
        except OSError as error:
            if not had_to_wait:
                logger.warning("%s cannot be written (%s); its records wait in memory", self._path, error)
            del self._unwritten[:-MOST_WAITING]

    def _close(self) -> None:
        if self._journal is not None:
            if self._unwritten:
                self._write_what_waits()
            try:
                self._journal.close()
            except OSError as error:
                logger.warning("%s could not be closed durably: %s", self._path, error)
            self._journal = None


def _target(args: Any) -> Path | None:
    """Where a run's journal goes; arguments that know no `logging_dir` (transformers 5) have an `output_dir`."""
    folder = getattr(args, "logging_dir", getattr(args, "output_dir", None))
    return None if folder is None else Path(folder) / FILE_NAME
