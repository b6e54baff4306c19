"""Writes records of a run to a JSON file that a killed, resumed or rolled-back run continues without repeats."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError, DataError
from onstep.files.bounded_reading import read_json
from onstep.files.json_values import encode
from onstep.record.cutting import MetricsLogHeldError, align_to, fork, set_aside, up_to
from onstep.record.gaps import MISSING, describe_gap
from onstep.record.metrics_log import MetricsLog
from onstep.record.names import numbered_name
from onstep.record.reading import Record, leading_records
from onstep.record.saved_log import NewestRecords, SavedLog, step_of

logger: logging.Logger = logging.getLogger(__name__)


class JsonLogWriter:
    """Appends records ``{"timestamp", "global_step", "epoch", **data}`` to a metrics log in a run's logging directory.

    The file is a JSON array that is valid after every record, whatever happens to the process. A run that resumes (with
    this writer's state from a checkpoint, or at a step > 0) continues its file; records written after the checkpoint
    are moved to ``<name>.branch-<n>.json``. A run that starts from another run's checkpoint begins with that run's
    records. A new run moves an existing file to ``<name>.<n>.json``. A file that is not a metrics log is renamed, never
    overwritten, and so is a directory of that name. If another live run is writing the file, this one uses the next
    ``<name>.<n>.json``.

    What a checkpoint covers survives a power failure: `make_durable` is called before the checkpoint is committed.
    Records that could not be written or made durable by then are in the state, and a resumed run writes them. If the
    file has lost records all the same, a record with `missing_records` replaces them, and a warning names them. A file
    whose covered bytes have changed otherwise is named, too, and continued as it is.

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
        self.level_of_branches = logging.WARNING
        """Level of the message about records that were moved to another file."""
        self.metrics_log: MetricsLog | None = None
        """The open file; None while the writer is closed."""
        self._saved: SavedLog | None = None
        """The position of the checkpoint that training is about to resume from."""
        self._newest = NewestRecords()

    @property
    def is_open(self) -> bool:
        """Whether the file is open, so that `write_record` has an effect."""
        return self.metrics_log is not None

    def open(self, logging_dir: str | Path, step: int = 0) -> list[Record] | None:
        """Open the file for training that continues from `step`, truncated to the records of that training.

        Of a file that is as the checkpoint left it, only the end is decoded; the rest is hashed.

        Args:
            logging_dir: Directory of a new file; a file that is continued stays where it is.
            step: Number of completed optimizer steps; 0 starts a new run.

        Returns:
            The records that the file then has; None if they are the checkpoint's, which `position` can read.

        Raises:
            ConfigError: if the file cannot be written.
        """
        self.close()
        with _naming(logging_dir):
            records = self._open_or_own(self._path_to_train(Path(logging_dir) / self.file_name, step), step)
        self._saved = None
        return records

    @property
    def position(self) -> SavedLog:
        """The position in the file after all records so far, or that of the checkpoint to resume from."""
        if self._saved is not None:
            return self._saved
        if self.metrics_log is not None:
            self._newest.note_end(self.metrics_log)
        return SavedLog() if self.path is None else self._newest.saved(self.path)

    def reopen(self, logging_dir: str | Path) -> None:
        """Open the file as it is, to add records outside of training, such as those of a standalone evaluation.

        Args:
            logging_dir: the directory of the file.

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

        While the disk is full or unavailable, records wait in memory, with a single warning; checkpoints contain them.

        Args:
            data: Data to record; its keys override `timestamp` (unix seconds), `global_step` and `epoch`.
        """
        if self.metrics_log is None:
            return
        self._newest.add(encode({"timestamp": time.time(), "global_step": step, "epoch": epoch, **data}))
        self.last_step = step
        self._write_what_waits(self.metrics_log)

    def close(self) -> None:
        """Flush the file to disk and close it; closing twice is harmless."""
        metrics_log, self.metrics_log = self.metrics_log, None
        if metrics_log is None:
            return
        self._write_what_waits(metrics_log)
        self._newest.note_end(metrics_log)
        if self._newest.waiting:
            logger.warning(
                "%d records of steps %d to %d are not in %s, which cannot be written. A run that continues from a "
                "checkpoint writes those that precede it; the others are lost when the process ends.",
                len(self._newest.waiting),
                *self._newest.steps_waiting,
                self.path,
            )
        try:
            metrics_log.close()
        except OSError as error:
            logger.warning("%s could not be flushed to disk on closing: %s", self.path, error)

    def make_durable(self) -> None:
        """Fsync the file; may be called from another thread. If that fails, later states contain the records."""
        metrics_log, newest = self.metrics_log, self._newest
        if metrics_log is not None:
            num_records = newest.num_records
            newest.note_sync(metrics_log.sync(), num_records)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the file's path, the number of its records, digests of the first and last one and
        of the file up to there, the step of the last one (-1 if none), and the records that follow but could not be
        written or made durable.

        Records written later, even at the same step, do not belong to the checkpoint.
        """
        return self.position.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's file at the next `open`; if already open, roll back to the checkpoint immediately.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            CheckpointError: for a state with values of wrong types.
        """
        saved, rolls_back = SavedLog.from_state(state_dict), self.is_open
        if rolls_back and saved.path is not None:  # not that of another run, whose checkpoint this is
            saved = replace(saved, path=self.path)
        self.close()
        self.path, self.last_step = saved.path, saved.last_step
        self._saved = None if saved.path is None else saved
        if saved.path is not None and rolls_back:
            if not self._open_at_end(saved.path):
                self._open(saved.path, *self._make_ready(saved.path, saved.last_step))
            self._saved = None

    def _path_to_train(self, target: Path, step: int) -> Path:
        saved = self._saved
        if saved is None or self.path is None:
            return target
        if not self.path.exists():
            logger.warning("%s, the metrics log to continue, is missing; recording in %s", self.path, target)
            if saved.last_record is None:
                self._saved = replace(saved, num_records=None)
            return target
        is_of_run = (self.path.parent / "run.json").exists() or _is_of_fork(target.parent)
        if self.path.resolve() == target.resolve() or not is_of_run:
            return self.path
        # the checkpoint belongs to another run, whose file is left alone
        if target.exists():
            set_aside(target)
        fork(self.path, target, num_records=saved.continued(leading_records(self.path), step).num_kept)
        logger.info("%s begins with the records of %s", target, self.path)
        return target

    def _open_at_end(self, path: Path) -> bool:
        """Open a file that is as the checkpoint left it, at the checkpoint's position; whether it is."""
        saved = self._saved
        opened = None if saved is None else saved.open_at_end(path)
        if opened is None:
            return False
        metrics_log, records, aside = opened
        self._note_aside(path, aside)
        if saved is not None and saved.digest not in (None, (metrics_log.num_bytes, metrics_log.digest)):
            metrics_log.close()
            return False
        self.metrics_log, self.path = metrics_log, path
        self._newest = NewestRecords(records, saved)
        self.last_step = _last_step(records)
        self._write_what_waits(self.metrics_log)
        return True

    def _make_ready(self, path: Path, step: int) -> tuple[list[Record], list[str]]:
        """Ensure that `path` has only records that a run at `step` continues; returns them, and those that it lacks."""
        if self._saved is not None:
            return self._make_ready_for(self._saved, path, step)
        records: list[Record] = []
        lacking: list[str] = []
        aside = None
        if path.exists() and (step > 0 or (path == self.path and self.last_step <= 0)):
            # continued in the same process, or an evaluation by this writer came first
            records, aside = align_to(path, up_to(step))
            lacking = [text for text in self._newest.waiting if step_of(json.loads(text)) <= step]
        elif path.exists():
            aside = set_aside(path)
        self._note_aside(path, aside)
        return records, lacking

    def _make_ready_for(self, saved: SavedLog, path: Path, step: int) -> tuple[list[Record], list[str]]:
        """Do as `_make_ready` for a checkpoint's position in the file, of which records may be lost."""
        found, has_changed = saved.continued([], step), not saved.is_as_written(path)

        def chosen(records: list[Record], is_damaged: bool) -> list[Record] | None:
            nonlocal found
            found = saved.continued(records, step, has_changed=has_changed)
            return None if found.is_foreign else records[: found.num_kept]

        records, aside = align_to(path, chosen) if path.exists() else ([], None)
        lacking = found.to_append
        if found.change is not None:
            logger.warning(
                "%s is not what the run had written up to step %d: %s. It was edited, its disk has damaged it, or the "
                "run has since repeated these steps. It is continued as it is; compare it with a copy, or with the "
                "same numbers in a tracker.",
                path,
                saved.last_step,
                found.change,
            )
        elif found.gap is None and lacking:
            logger.info("%s: %d records that it lacked are restored from the checkpoint", path, len(lacking))
        elif found.gap is not None:
            logger.warning(
                "%s: %s, although the checkpoint covers them%s. The file is not as the run left it: its end was "
                "lost in a power failure, or it was replaced by another file.",
                path,
                describe_gap(found.gap),
                f" ({len(lacking) - 1} were restored from it)" if len(lacking) > 1 else "",
            )
        self._note_aside(path, aside)
        return records, lacking

    def _open(self, path: Path, records: list[Record], lacking: list[str]) -> list[Record]:
        """Open the file, which has these records, and append those that it lacks; returns all."""
        self.metrics_log = metrics_log = MetricsLog.open_aligned(path)
        self.path = path
        self._newest = NewestRecords(records)
        for text in lacking:
            self._newest.add(text)
        records = [*records, *map(json.loads, lacking)]
        self.last_step = _last_step(records)
        self._write_what_waits(metrics_log)
        return records

    def _open_or_own(self, path: Path, step: int | None = None) -> list[Record] | None:
        """Open the file, prepared for training from `step`; a separate file if another live run is writing it."""
        try:
            if step is not None and self._open_at_end(path):
                return None
            return self._open(path, *(self._as_it_is(path) if step is None else self._make_ready(path, step)))
        except MetricsLogHeldError as error:
            own = numbered_name(path)
            logger.warning("%s Recording in %s.", error, own)
            return self._open(own, [], [])

    def _as_it_is(self, path: Path) -> tuple[list[Record], list[str]]:
        """All records of a file, repaired if a crash has damaged it, and those that wait to be written."""
        return align_to(path, up_to())[0] if path.exists() else [], self._newest.waiting

    def _note_aside(self, path: Path, aside: Path | None) -> None:
        if aside is not None:
            text = "%s: records that this run does not continue were moved to %s"
            logger.log(self.level_of_branches, text, path, aside)

    def _write_what_waits(self, metrics_log: MetricsLog) -> None:
        """Append records that are not in the file yet; those that the disk refuses stay in memory."""
        had_to_wait = len(self._newest.waiting) > 1
        try:
            self._newest.write(metrics_log.append_encoded)
        except OSError as error:
            if not had_to_wait:
                logger.warning(
                    "cannot write %s (%s); its records are kept in memory and in checkpoints", self.path, error
                )


def _is_of_fork(directory: Path) -> bool:
    """Whether it is the directory of a run that was forked from another one, where all of its logs are."""
    try:
        content = read_json(directory / "run.json")
    except (OSError, DataError):
        return False
    return isinstance(content, dict) and "forked_from" in content


def _last_step(records: list[Record]) -> int:
    """The step of the last record that is not a gap; -1 if there is none."""
    return next((step_of(record) for record in reversed(records) if MISSING not in record), -1)


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
