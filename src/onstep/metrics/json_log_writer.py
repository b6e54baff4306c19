"""Writes records of a run to a JSON file that a killed, resumed or rolled-back run continues without repeats."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError
from onstep.metrics_log import MetricsLog, MetricsLogHeldError, align, fork, numbered_name, read_records, set_aside

logger: logging.Logger = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Maximum number of records that wait in memory for disk space; beyond it, the oldest are lost."""


class JsonLogWriter:
    """Appends records ``{"timestamp", "global_step", "epoch", **data}`` to a metrics log in a run's logging directory.

    The file is a JSON array that is valid after every record, whatever happens to the process. A run that resumes (with
    this writer's state from a checkpoint, or at a step > 0) continues its file; records written after the checkpoint
    are moved to ``<name>.branch-<n>.json``. A run that starts from another run's checkpoint begins with that run's
    records. A new run moves an existing file to ``<name>.<n>.json``. A file that is not a metrics log is renamed, never
    overwritten, and so is a directory of that name. If another live run is writing the file, this one uses the next
    ``<name>.<n>.json``.

    Only one rank of a run may write.

    Args:
        file_name: Name of the file in the logging directory, such as ``gradient_norms.json``.
    """

    def __init__(self, file_name: str) -> None:
        self.file_name = file_name
        self.path: Path | None = None
        """The file of this run, also while it is closed; None before the first `open`."""
        self.last_step = -1
        """Step of the last record; -1 if there is none."""
        self.metrics_log: MetricsLog | None = None
        """The open file; None while the writer is closed."""
        self._resume_step: int | None = None
        """Step of the last record at the time of the checkpoint that training is about to resume from."""
        self._unwritten: list[dict[str, Any]] = []
        self._num_records: int | None = 0
        """Number of records in the open metrics log; when resuming, those the checkpoint covers (None: unknown)."""

    @property
    def is_open(self) -> bool:
        """Whether the file is open, so that `write_record` has an effect."""
        return self.metrics_log is not None

    def open(self, logging_dir: str | Path, step: int = 0) -> None:
        """Open the file for training that continues from `step`, truncated to the records of that training.

        Args:
            logging_dir: Directory of a new file; a file that is continued stays where it is.
            step: Number of completed optimizer steps; 0 starts a new run.

        Raises:
            ConfigError: if the file cannot be written.
        """
        self.close()
        with _naming(logging_dir):
            self._open_or_own(self._path_to_train(Path(logging_dir) / self.file_name), step)
        self._resume_step = None

    def reopen(self, logging_dir: str | Path) -> None:
        """Open the file as it is, to add records outside of training, such as those of a standalone evaluation.

        Raises:
            ConfigError: if the file cannot be written.
        """
        if self.is_open:
            return
        with _naming(logging_dir):
            path = Path(logging_dir) / self.file_name
            self._open_or_own(self.path if self.path is not None and self.path.exists() else path)

    def write_record(self, step: int, epoch: float, data: Mapping[str, Any]) -> None:
        """Append a record; on return it is in the file. Does nothing while the writer is closed.

        On a full disk, records wait in memory for space, with a single warning.

        Args:
            data: Data to record; its keys override `timestamp` (unix seconds), `global_step` and `epoch`.
        """
        if self.metrics_log is None:
            return
        self._unwritten.append({"timestamp": time.time(), "global_step": step, "epoch": epoch, **data})
        self.last_step = step
        self._write_what_waits(self.metrics_log)

    def close(self) -> None:
        """Flush the file to disk and close it; closing twice is harmless."""
        metrics_log, self.metrics_log = self.metrics_log, None
        if metrics_log is None:
            return
        if self._unwritten:
            self._write_what_waits(metrics_log)
        try:
            metrics_log.close()
        except OSError as error:
            logger.warning("%s could not be flushed to disk on closing: %s", self.path, error)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the file's path, the step of its last record (-1 if none) and the number of records.

        Records written later, even at the same step, do not belong to the checkpoint.
        """
        return {
            "log_path": None if self.path is None else str(self.path),
            "last_step": self.last_step,
            "num_records": self._num_records,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's file at the next `open`; if already open, roll back to the checkpoint immediately."""
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
            logger.warning("%s, the metrics log to continue, is missing; recording in %s", self.path, target)
            self._num_records = None
            return target
        if self.path.resolve() == target.resolve() or not (self.path.parent / "run.json").exists():
            return self.path
        # the checkpoint belongs to another run, whose file is left alone
        if target.exists():
            set_aside(target)
        fork(self.path, target, num_records=self._num_records)
        logger.info("%s begins with the records of %s", target, self.path)
        return target

    def _make_ready(self, path: Path, step: int) -> None:
        """Ensure that `path` holds exactly the records that a run at `step` continues, or does not exist."""
        if not path.exists():
            return
        if self._resume_step is not None:
            last_step = max(step, self._resume_step) if self._num_records is None else None
            aside = align(path, last_step, num_records=self._num_records)
        elif step > 0 or (path == self.path and self.last_step <= 0):  # at most an evaluation by this writer
            aside = align(path, step)
        else:
            aside = set_aside(path)
        if aside is not None:
            logger.warning("%s: records that this run does not continue were moved to %s", path, aside)

    def _open(self, path: Path) -> None:
        self.metrics_log = MetricsLog.open(path)
        self.path = path
        records = read_records(path)
        self._num_records = len(records)
        self.last_step = records[-1].get("global_step", -1) if records else -1

    def _open_or_own(self, path: Path, step: int | None = None) -> None:
        """Open the file, prepared for training from `step`; a separate file if another live run is writing it."""
        try:
            if step is not None:
                self._make_ready(path, step)
            self._open(path)
        except MetricsLogHeldError as error:
            own = numbered_name(path)
            logger.warning("%s Recording in %s.", error, own)
            self._open(own)

    def _write_what_waits(self, metrics_log: MetricsLog) -> None:
        """Append records that are not in the file yet; on a full disk, log a warning and keep them in memory."""
        had_to_wait = len(self._unwritten) > 1
        try:
            while self._unwritten:
                metrics_log.append(self._unwritten[0])
                del self._unwritten[0]
                self._num_records = (self._num_records or 0) + 1
        except OSError as error:
            if not had_to_wait:
                logger.warning("cannot write %s (%s); its records are kept in memory", self.path, error)
            del self._unwritten[:-MOST_WAITING]


@contextmanager
def _naming(logging_dir: str | Path) -> Iterator[None]:
    """Name the setting to change if a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to logging_dir {logging_dir} ({error}); choose another logging_dir, or make it writable."
        ) from error


def logging_dir_of(args: Any) -> Path | None:
    """Directory of a run's records, or None. For transformers' arguments without `logging_dir`, their `output_dir`."""
    directory = getattr(args, "logging_dir", getattr(args, "output_dir", None))
    return None if directory is None else Path(directory)
