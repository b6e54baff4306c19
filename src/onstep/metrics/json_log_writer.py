"""Writes records of a run to a JSON file that a killed, resumed or rolled-back run continues without repeats."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError
from onstep.metrics_log import Journal, JournalHeldError, align, fork, numbered_name, read_records, set_aside

logger: logging.Logger = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Records that wait in memory for room on the disk; of more, the oldest are lost."""


class JsonLogWriter:
    """Appends records ``{"timestamp", "global_step", "epoch", **data}`` to a journal in a run's logging folder.

    The file is a JSON array and valid after every record, whatever happens to the process. A run that continues (with
    this writer's state from a checkpoint, or at a step > 0) continues its file; what was written after the checkpoint
    is kept aside in ``<name>.branch-<n>.json``. A run that starts from another run's checkpoint begins with that run's
    records. A run that begins where a file exists moves that one to ``<name>.<n>.json``. A file that is no journal is
    renamed, never overwritten, and so is a folder of that name. Where another live run writes the file, this one takes
    the next ``<name>.<n>.json``.

    Only one rank of a run may write.

    Args:
        file_name: Name of the file in the logging folder, such as ``gradient_norms.json``.
    """

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        self.path: Path | None = None
        """The file of this run, also while it is closed; None before the first `open`."""
        self.last_step = -1
        """Step of the last record; -1 before the first."""
        self.journal: Journal | None = None
        """The open file; None while the writer is closed."""
        self._resume_step: int | None = None
        """Step of the last record when the checkpoint was saved that training is about to continue from."""
        self._unwritten: list[dict[str, Any]] = []
        self._num_records: int | None = 0
        """Records of the open journal; when continuing, those that the checkpoint covers (None: it does not say)."""

    @property
    def is_open(self) -> bool:
        """Whether `write_record` writes."""
        return self.journal is not None

    def open(self, logging_dir: str | Path, step: int = 0) -> None:
        """Open the file for a training that goes on from `step`, cut to what that training continues.

        Args:
            logging_dir: Folder of a file that begins here; a file that is continued stays where it is.
            step: Optimizer steps that are done; 0 begins a run.

        Raises:
            ConfigError: when the file cannot be written.
        """
        self.close()
        with _naming(logging_dir):
            self._open_or_own(self._path_to_train(Path(logging_dir) / self.file_name), step)
        self._resume_step = None

    def reopen(self, logging_dir: str | Path) -> None:
        """Open the file as it is, to add what belongs to no training, such as an evaluation alone.

        Raises:
            ConfigError: when the file cannot be written.
        """
        if self.is_open:
            return
        with _naming(logging_dir):
            path = Path(logging_dir) / self.file_name
            self._open_or_own(self.path if self.path is not None and self.path.exists() else path)

    def write_record(self, step: int, epoch: float, data: Mapping[str, Any]) -> None:
        """Append a record; when this returns, it is in the file. Nothing happens while the writer is closed.

        On a full disk records wait in memory for room, with one warning.

        Args:
            data: What to record; its keys win over `timestamp` (unix seconds), `global_step` and `epoch`.
        """
        if self.journal is None:
            return
        self._unwritten.append({"timestamp": time.time(), "global_step": step, "epoch": epoch, **data})
        self.last_step = step
        self._write_what_waits(self.journal)

    def close(self) -> None:
        """Let go of the file, durably; closing twice is harmless."""
        journal, self.journal = self.journal, None
        if journal is None:
            return
        if self._unwritten:
            self._write_what_waits(journal)
        try:
            journal.close()
        except OSError as error:
            logger.warning("%s could not be closed durably: %s", self.path, error)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the file's path, the step of its last record (-1 before the first), and how many.

        What is written later, even at the same step, does not belong to the checkpoint.
        """
        return {
            "log_path": None if self.path is None else str(self.path),
            "last_step": self.last_step,
            "num_records": self._num_records,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's file at the next `open`; while it is open, go back to the checkpoint at once."""
        goes_back = self.is_open
        self.close()
        log_path = state_dict["log_path"]
        self.path = None if log_path is None else Path(log_path)
        self.last_step = self._resume_step = state_dict["last_step"]
        self._num_records = state_dict.get("num_records")
        if self.path is None:
            self._resume_step = None
        elif goes_back:
            self._make_ready(self.path, self.last_step)
            self._open(self.path)
            self._resume_step = None

    def _path_to_train(self, target: Path) -> Path:
        if self._resume_step is None or self.path is None:
            return target
        if not self.path.exists():
            logger.warning("%s, the journal to continue, is gone; recording in %s", self.path, target)
            self._num_records = None
            return target
        if self.path.resolve() == target.resolve() or not (self.path.parent / "run.json").exists():
            return self.path
        # the checkpoint is of another run, whose file is left alone
        if target.exists():
            set_aside(target)
        fork(self.path, target, num_records=self._num_records)
        logger.info("%s begins with the records of %s", target, self.path)
        return target

    def _make_ready(self, path: Path, step: int) -> None:
        """Leave at `path` what a run at `step` continues, or nothing."""
        if not path.exists():
            return
        if self._resume_step is not None:
            last_step = max(step, self._resume_step) if self._num_records is None else None
            aside = align(path, last_step, num_records=self._num_records)
        elif step > 0 or (path == self.path and self.last_step <= 0):  # no more than an evaluation by this writer
            aside = align(path, step)
        else:
            aside = set_aside(path)
        if aside is not None:
            logger.warning("%s: what this run does not continue is kept in %s", path, aside)

    def _open(self, path: Path) -> None:
        self.journal = Journal.open(path)
        self.path = path
        records = read_records(path)
        self._num_records = len(records)
        self.last_step = records[-1].get("global_step", -1) if records else -1

    def _open_or_own(self, path: Path, step: int | None = None) -> None:
        """Open the file, made ready for a training from `step`; one of our own where another live run writes it."""
        try:
            if step is not None:
                self._make_ready(path, step)
            self._open(path)
        except JournalHeldError as error:
            own = numbered_name(path)
            logger.warning("%s Recording in %s.", error, own)
            self._open(own)

    def _write_what_waits(self, journal: Journal) -> None:
        """Append what is not in the file yet; a full disk costs a warning, and the records wait for room."""
        had_to_wait = len(self._unwritten) > 1
        try:
            while self._unwritten:
                journal.append(self._unwritten[0])
                del self._unwritten[0]
                self._num_records = (self._num_records or 0) + 1
        except OSError as error:
            if not had_to_wait:
                logger.warning("%s cannot be written (%s); its records wait in memory", self.path, error)
            del self._unwritten[:-MOST_WAITING]


@contextmanager
def _naming(logging_dir: str | Path) -> Iterator[None]:
    """Say which setting is to be changed where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"logging_dir {logging_dir} cannot be written ({error}); choose another logging_dir, or make it writable."
        ) from error


def logging_dir_of(args: Any) -> Path | None:
    """Where a run's records go; None for nowhere. Of transformers' arguments, without `logging_dir`, `output_dir`."""
    folder = getattr(args, "logging_dir", getattr(args, "output_dir", None))
    return None if folder is None else Path(folder)
