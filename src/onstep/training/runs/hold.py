"""Holds the directory of a run for a process, and restores it where the start fails, so that nothing is left behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from onstep.errors import DataError
from onstep.files.bounded_reading import MAX_JSON_BYTES, open_file, read_bytes
from onstep.files.durability import replace_durably
from onstep.training.runs.identity import IDENTITY_FILE
from onstep.training.runs.lock import LEASE, LOCK, RunLock
from onstep.training.runs.mirrored import MirroredRun

logger = logging.getLogger(__name__)

MEMORY_NOTE = "memory.json"
"""Says which states in the memory of the nodes continue the run."""
_RECORDS = ("run.json", IDENTITY_FILE, MEMORY_NOTE)
_APPENDED = ("decisions.jsonl", "record.jsonl")
"""Lines are only appended, so that restoring them is cutting them to their size."""
PROBES = ".write-test-*"
"""Files with which processes check that they can write."""
_LOGS = ("record.jsonl", "trainer_logs.json")
_OURS = frozenset((*_RECORDS, LOCK, LEASE, *(f"{name}.tmp" for name in _RECORDS), *_LOGS))
"""What claiming a directory writes into it, and the record and the metrics log, which a start of training opens."""


class Hold:
    """Keeps other processes out of a run's directory until `release`, and remembers what it found there.

    Args:
        path: the directory, which exists.
        made: the directories among it and its parents that were made for this start, the innermost first.

    Raises:
        RunExistsError: if a live process holds it.
        OSError: if it cannot be written or read.
    """

    def __init__(self, path: Path, made: Sequence[Path] = ()) -> None:
        self.path, self._made = path, made
        self.mirrored: MirroredRun | None = None
        """Uploads what the run writes, until the directory is released."""
        self.lock = RunLock(path / LOCK)
        try:
            self._entries = {one.name for one in path.iterdir()} - ({LOCK} if self.lock.is_new else set())
        except BaseException:
            self.lock.discard()
            raise
        self._records: dict[str, bytes] = {}
        for name in _RECORDS:
            with suppress(OSError, DataError):  # claiming the directory says what is wrong with it
                self._records[name] = read_bytes(path / name, MAX_JSON_BYTES)
        self._sizes = {name: _size(path / name) for name in _APPENDED}

    @property
    def had_run(self) -> bool:
        """Whether the directory was a run's before this start."""
        return "run.json" in self._entries

    def undo(self) -> bool:
        """Remove what the start wrote, if that is nothing but the records of a run.

        Returns:
            Whether the directory is as before. It is left as it is if callbacks or trackers have written into it.
        """
        try:
            present = {one.name for one in self.path.iterdir() if not one.match(PROBES)}  # those are other processes'
            new = present - self._entries
            if not new <= _OURS and not self._only_empty_directories(new - _OURS):
                return False
            self._restore_records()
            for name, before in self._sizes.items():
                if before is not None and (_size(self.path / name) or 0) > before:
                    os.truncate(self.path / name, before)
            # the lock last, as the directory is another's without it, and before it what makes the directory a run's
            for name in sorted(new, key=lambda name: (name in (LOCK, LEASE), name == "run.json")):
                one = self.path / name
                one.rmdir() if one.is_dir() else one.unlink(missing_ok=True)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            logger.warning("what the failed start has written to %s could not be removed: %s", self.path, error)
            return False
        remove_empty(self._made)
        return True

    def undo_records(self) -> bool:
        """Restore the records of a run that was there; whether that was possible."""
        try:
            self._restore_records()
        except OSError as error:
            logger.warning("%s is that of the failed start, as it could not be restored: %s", self.path, error)
            return False
        return True

    def abandon(self) -> None:
        """Undo the start as far as possible, and let other processes in."""
        try:
            self.undo()
        finally:
            self.release()

    def release(self) -> None:
        """Let other processes in; calling it twice is harmless."""
        if self.mirrored is not None:
            self.mirrored.close()
        self.lock.release()

    def finish(self) -> None:
        """Release the directory of a run that has ended as it should.

        Raises:
            Preempted: if the last upload to its object store was ended by a signal.
            StoreError: if something of the run is not there for another reason.
        """
        self.release()
        if self.mirrored is not None:
            self.mirrored.finish()

    def _restore_records(self) -> None:
        for name, content in self._records.items():
            if not _has(self.path / name, content):
                replace_durably(self.path / name, content)

    def _only_empty_directories(self, names: set[str]) -> bool:
        return all((self.path / name).is_dir() and not any((self.path / name).iterdir()) for name in names)


@contextmanager
def abandoned_on_error(hold: Hold | None) -> Iterator[None]:
    """A part of the start: if it fails, the directory is as before, and nobody's."""
    try:
        yield
    except BaseException:
        if hold is not None:
            hold.abandon()
        raise


def missing_directories(path: Path) -> tuple[Path, ...]:
    """The directories among it and its parents that do not exist, the innermost first."""
    return tuple(one for one in (path, *path.parents) if not one.exists())


def remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, the innermost first, up to one that is not there or that others use by now."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _has(path: Path, content: bytes) -> bool:
    with open_file(path) as file:
        return file.read(len(content) + 1) == content
