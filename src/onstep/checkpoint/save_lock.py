"""Tells the files of a live save from those that a dead one left: a lock that falls away with its process."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from onstep.checkpoint.store import FileStore
from onstep.errors import CheckpointError
from onstep.forking import release_in_forked_children

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""What file systems without locks answer."""


class SaveLock:
    """A lock file beside the temporary folder of a save, held until `release` or the end of the process."""

    def __init__(self, store: FileStore, path: Path, descriptor: int) -> None:
        self.path = path
        self._store = store
        self._descriptor: int | None = descriptor
        release_in_forked_children(self, SaveLock._close)

    @classmethod
    def take(cls, store: FileStore, path: Path) -> SaveLock | None:
        """Make the lock file and lock it; None if a sweep got hold of it in between, so that another name is needed."""
        descriptor = store.open_lock(path)
        lock = cls(store, path, descriptor)
        if _try_lock(path, descriptor) and _is_still_there(path, descriptor):
            return lock
        lock._close()
        return None

    def release(self) -> None:
        """Remove the lock file and let go; releasing twice is harmless."""
        if self._descriptor is not None:
            try:
                self._store.unlink(self.path)
            finally:
                self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def _try_lock(path: Path, descriptor: int) -> bool:
    """False if another process has the lock; a file system without locks gives none, and sweeps keep off then."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise CheckpointError(f"{path} cannot be locked ({error.strerror}); see to the file system.") from error
    return True


def is_held(path: Path) -> bool:
    """Whether a live save holds the lock file; where the file system has no locks, whether the file exists."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to open: what may be alive stays
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # by another process, or nobody can tell: what may be alive stays
    else:
        return False
    finally:
        os.close(descriptor)


def _is_still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
