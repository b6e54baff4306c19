"""Locks a directory for a process, also on a disk without locks, and finds it where it is moved to."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout, lock_descriptor

from onstep.errors import RunExistsError
from onstep.files.durability import is_still_at
from onstep.processes.forking import release_in_forked_children

logger = logging.getLogger(__name__)

LOCK = ".run.lock"
LEASE = ".run.lease"
"""Beside the lock, on a disk without locks."""
_LEASE_SECONDS = 120.0
_TAKEOVER_SECONDS = 2.0
"""To take over the lease of a process that has ended on this machine."""


class RunLock:
    """Holds `path` until `release` or the end of the process. A forked child (a data loader's worker) does not hold it.

    A disk without locks (some network mounts) has a lease instead: a file that this process renews. One of a process
    that has ended on this machine is taken over at once, one of another machine once it has not been renewed for two
    minutes.

    Args:
        path: the lock file, which stays there.
        owner: named to whom the lock is refused, in addition to the process.

    Raises:
        RunExistsError: if a live process holds it.
        OSError: if it cannot be written, or is not a file.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self._owner = owner
        self._descriptor: int | None = None
        self._directory: int | None = None
        """The directory of the file, to find it once it is moved."""
        self._lease: SoftFileLease | None = None
        self.is_new = False
        """Whether nobody has held it before."""
        self.take(path)
        release_in_forked_children(self, RunLock._close)

    def take(self, path: Path) -> None:
        """Hold this file instead of the one held so far; raises as the constructor does."""
        self.release()
        self._path = path = path.absolute()
        self._parent = path.parent
        self._acquire(path)
        while not is_still_at(path, self._descriptor):  # its holder, whose start had failed, has removed it
            self.release()
            self._acquire(path)

    @property
    def place(self) -> Path | None:
        """The directory of the lock file, wherever it was moved to; None if it was removed, or the lock released."""
        if self._directory is None or is_still_at(self._parent, self._directory):
            return None if self._directory is None else self._parent
        try:
            found = Path(os.readlink(f"/proc/self/fd/{self._directory}"))
        except OSError:  # only Linux tells
            return None
        return found if is_still_at(found, self._directory) else None

    def _acquire(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.release()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        try:
            is_free = lock_descriptor(self._descriptor, blocking=False)
        except OSError:  # a file system without locks
            self._lease = _leased(path.with_name(LEASE))
            is_free = self._lease is not None
        if not is_free:
            holder = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace").strip()
            self.release()
            raise RunExistsError(
                f"{path.parent} is in use by a live process ({holder or 'one that has just begun'}); wait for it or "
                f"end it, or choose another directory."
            )
        try:
            self._directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.is_new = not os.pread(self._descriptor, 1, 0)
            os.ftruncate(self._descriptor, 0)
            who = f"{self._owner}process {os.getpid()} on {socket.gethostname()}\n"
            os.pwrite(self._descriptor, who.encode(), 0)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Release the lock, and remove its file if nobody has held it before."""
        with suppress(OSError):
            if self.is_new and is_still_at(self._path, self._descriptor):
                self._path.unlink()
        self.release()

    def release(self) -> None:
        """Release the lock; calling it twice is harmless."""
        self._close()
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _close(self) -> None:
        descriptors, self._descriptor, self._directory = (self._descriptor, self._directory), None, None
        for descriptor in descriptors:
            if descriptor is not None:
                os.close(descriptor)


def _leased(path: Path) -> SoftFileLease | None:
    """The lease of this file; None if another process has it."""
    lease = SoftFileLease(path, lease_duration=_LEASE_SECONDS, on_compromise=_tell_of_loss, thread_local=False)
    try:
        lease.acquire(timeout=_TAKEOVER_SECONDS)
    except Timeout:
        owner = lease.owner
        if owner is None or owner.hostname.partition("?")[0] == socket.gethostname():
            return None
        logger.warning(
            "the disk of %s has no locks, and a process on %s was working there; waiting up to %d s for a sign of life",
            path.parent,
            owner.hostname,
            _LEASE_SECONDS,
        )
        try:
            lease.acquire(timeout=_LEASE_SECONDS + _TAKEOVER_SECONDS)
        except Timeout:
            return None
    return lease


def _tell_of_loss(loss: LeaseCompromise) -> None:
    logger.error(
        "this process no longer holds %s (%s): the disk did not answer for a long time, and another process may work "
        "in its directory now; end one of them",
        loss.lock_file,
        loss.reason,
    )
