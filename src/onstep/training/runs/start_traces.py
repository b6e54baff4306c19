"""Restores the directory of a run whose start failed, so that nothing of it is left behind."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from onstep.bounded_reading import MAX_JSON_BYTES, open_file, read_bytes
from onstep.durability import replace_durably
from onstep.errors import RunExistsError
from onstep.training.runs.identity import IDENTITY_FILE
from onstep.training.runs.run_dir import RunLock

logger = logging.getLogger(__name__)

_RECORDS = ("run.json", IDENTITY_FILE)
_LOCK = ".run.lock"
_OURS = (*_RECORDS, _LOCK, *(f"{name}.tmp" for name in _RECORDS), "trainer_logs.json")
"""What claiming a directory writes into it, and the metrics log, which is opened when training starts."""


@dataclass(frozen=True)
class StartTraces:
    """A directory as it was before a start."""

    path: Path
    entries: frozenset[str]
    """Names of what was in it."""
    records: dict[str, bytes] = field(repr=False)
    """The content of its records."""
    missing: tuple[Path, ...]
    """The directories among it and its parents that did not exist, the innermost first."""

    @classmethod
    def before(cls, path: Path) -> StartTraces:
        """The present state of a directory, which need not exist.

        Raises:
            OSError: if it cannot be read.
            DataError: for a record that is too large to be one.
        """
        missing = tuple(one for one in (path, *path.parents) if not one.exists())
        entries = frozenset(one.name for one in path.iterdir()) if path.is_dir() else frozenset()
        records = {name: read_bytes(path / name, MAX_JSON_BYTES) for name in _RECORDS if (path / name).is_file()}
        return cls(path, entries, records, missing)

    @property
    def had_run(self) -> bool:
        """Whether the directory was a run's before this start."""
        return "run.json" in self.entries

    def undo_unclaimed(self) -> None:
        """Do as `undo` for a start that does not hold the lock, unless a live process does: what is new is its own."""
        with suppress(OSError, RunExistsError):
            if self._is_as_before():
                return
            lock = RunLock(self.path / _LOCK)
            try:
                self.undo()
            finally:
                lock.release()

    def undo(self) -> bool:
        """Remove what the start wrote, if that is nothing but the records of a run; the process holds its lock.

        Returns:
            Whether the directory is as before. It is left as it is if callbacks or trackers have written into it.
        """
        try:
            new = {one.name for one in self.path.iterdir()} - self.entries
            if not new <= set(_OURS) and not self._only_empty_directories(new - set(_OURS)):
                return False
            self._restore_records()
            for name in new:
                one = self.path / name
                one.rmdir() if one.is_dir() else one.unlink(missing_ok=True)
            if self.missing:
                self.path.rmdir()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            logger.warning("what the failed start has written to %s could not be removed: %s", self.path, error)
            return False
        with suppress(OSError):  # others use them by now
            for directory in self.missing[1:]:
                directory.rmdir()
        return True

    def undo_records(self) -> bool:
        """Restore the records of a run that was there; whether that was possible. The process holds its lock."""
        try:
            self._restore_records()
        except OSError as error:
            logger.warning("%s is that of the failed start, as it could not be restored: %s", self.path, error)
            return False
        return True

    def _restore_records(self) -> None:
        for name, content in self.records.items():
            if not _has(self.path / name, content):
                replace_durably(self.path / name, content)

    def _is_as_before(self) -> bool:
        present = {one.name for one in self.path.iterdir()}
        return present == self.entries and all(_has(self.path / name, was) for name, was in self.records.items())

    def _only_empty_directories(self, names: set[str]) -> bool:
        return all((self.path / name).is_dir() and not any((self.path / name).iterdir()) for name in names)


def _has(path: Path, content: bytes) -> bool:
    with open_file(path) as file:
        return file.read(len(content) + 1) == content
