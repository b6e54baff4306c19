"""The files of a run besides its checkpoints, in an object store: those that changed are uploaded again."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from onstep.errors import DataError, StoreError
from onstep.files.bounded_reading import read_json
from onstep.mirror.remote_checkpoints import NAME
from onstep.stores.bucket import Bucket, Listed, Tag
from onstep.stores.lease import LEASE, LOCAL_LOCK

Stamp = tuple[int, int, int]
"""Time of change, size and inode of a file."""
_NOT_OF_THE_RUN = re.compile(
    r"\.run\.(lock|lease.*)|.*\.tmp|\.write-test-.*|latest|\.(tmp|trash|superseded|mirror)-.*|checkpoint-[0-9]+|aside"
)
"""Names of locks, of what is being written, of checkpoints and of what is set aside."""
_SWAPPED_BYTES = 64 * 1024**2
"""Larger files, such as final weights, are uploaded in parts, which cannot be put on a condition."""


def has_flat_layout(directory: Path) -> bool:
    """Whether a run has its checkpoints and weights in its directory itself, as a Trainer's has.

    Args:
        directory: of the run on this machine.
    """
    try:
        content = read_json(directory / "run.json")
    except (OSError, DataError):
        return False
    return isinstance(content, dict) and content.get("layout") == "hugging_face"


class RunFiles:
    """The files of a run besides its checkpoints, and the versions of them that are in the store."""

    def __init__(self, bucket: Bucket, directory: Path) -> None:
        self._bucket, self._directory = bucket, directory
        self._tags: dict[str, Tag | None] = {}
        self._stamps: dict[str, Stamp] = {}

    def remote(self) -> list[Listed]:
        """Those in the store."""
        listed = [one for one in self._bucket.list() if NAME.fullmatch(one.name) is None]
        return [one for one in listed if one.name not in (LEASE, LOCAL_LOCK)]

    def look(self) -> None:
        """Find out which files are in the store."""
        self._tags = {one.name: None for one in self.remote()}

    def fetch(self) -> None:
        """Write those in the store to the directory."""
        listed = self.remote()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._bucket.download(listed, self._directory)

    def upload(self, check: Callable[[], None]) -> None:
        """Upload what has changed since the last upload, and delete what this process has uploaded and is gone.

        What the directory lacked before, such as a log that was removed from a scratch disk, stays in the store.

        Args:
            check: raises if another process owns the run; called where the store has another version than expected.
        """
        local = self._local()
        for name, stamp in local.items():
            if self._stamps.get(name) != stamp and self._put(name, check):
                self._stamps[name] = stamp
        gone = [name for name in self._stamps if name not in local]
        if gone:
            check()
            self._bucket.delete(gone)
            for name in gone:
                del self._tags[name], self._stamps[name]

    @property
    def left_bytes(self) -> int:
        """Bytes of those that have changed since they were uploaded."""
        return sum(stamp[1] for name, stamp in self._local().items() if self._stamps.get(name) != stamp)

    def _put(self, name: str, check: Callable[[], None]) -> bool:
        path = self._directory / name
        try:
            size = path.stat().st_size
            if size > _SWAPPED_BYTES:
                check()
                self._tags[name] = self._bucket.upload(name, path)
                return True
            content = path.read_bytes()
        except FileNotFoundError:
            return False  # it is gone by now
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error.strerror}); it is not uploaded.") from None
        while (tag := self._written(name, content)) is None:
            check()
            found = self._bucket.get(name)
            self._tags[name] = None if found is None else found[1]
        self._tags[name] = tag
        return True

    def _written(self, name: str, content: bytes) -> Tag | None:
        known = self._tags.get(name)
        return self._bucket.create(name, content) if known is None else self._bucket.swap(name, content, known)

    def _local(self) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        for folder, folders, names in os.walk(self._directory):
            folders[:] = sorted(one for one in folders if not _NOT_OF_THE_RUN.fullmatch(one))
            for name in sorted(names):
                path = Path(folder, name)
                if _NOT_OF_THE_RUN.fullmatch(name) is not None:
                    continue
                with suppress(FileNotFoundError):  # it is gone by now
                    facts = path.lstat()
                    if stat.S_ISREG(facts.st_mode):
                        relative = path.relative_to(self._directory).as_posix()
                        found[relative] = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
        return found
