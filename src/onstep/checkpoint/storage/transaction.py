"""A save, from a temporary folder to a checkpoint: it becomes one by one rename, after all of it is durable."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from filelock import lock_descriptor

from onstep.checkpoint.storage.manifest import MANIFEST, Manifest, check_file, verify
from onstep.checkpoint.storage.store import TEMPORARY, TRASH, FileStore
from onstep.errors import CheckpointError
from onstep.forking import release_in_forked_children

logger = logging.getLogger(__name__)

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
        return lock_descriptor(descriptor, blocking=False)
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
        return not lock_descriptor(descriptor, blocking=False)
    except OSError:
        return True  # nobody can tell: what may be alive stays
    finally:
        os.close(descriptor)


def _is_still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


LATEST = "latest"
"""Name of the file that names the newest checkpoint: a hint for people and scripts, never trusted here."""
SUPERSEDED = ".superseded-"
"""Prefix of a checkpoint that makes way for one of the same step."""
_OF_A_SAVE = re.compile(r"\.(?P<kind>tmp|superseded)-(?P<save>checkpoint-[0-9]+-[0-9a-f]{8})(?P<end>|\.lock|\.latest)")
_TRASH = re.compile(re.escape(TRASH) + r".+-[0-9a-f]{8}")


class SaveTransaction:
    """One save of one step, on the process that commits it.

    `prepare`, write all files below `folder` (any rank may), then `commit`, or `abandon` after a failure. A lock file
    beside the folder keeps sweeps of other processes away from it.
    """

    def __init__(self, store: FileStore, root: Path, step: int) -> None:
        self.step = step
        self._store = store
        self._root = root
        self._lock: SaveLock | None = None
        self._name_anew()

    def _name_anew(self) -> None:
        self._unique = f"checkpoint-{self.step}-{secrets.token_hex(4)}"

    @property
    def folder(self) -> Path:
        """Where the files are written; no two saves share one."""
        return self._root / f"{TEMPORARY}{self._unique}"

    @property
    def target(self) -> Path:
        """What the folder is called once it is a checkpoint."""
        return self._root / f"checkpoint-{self.step}"

    def prepare(self) -> None:
        """Make and lock the folder.

        Raises:
            CheckpointError: when something that is no checkpoint has the name of this one, or the disk refuses.
        """
        self._check_not_foreign()
        self._store.make_root(self._root)
        while (lock := SaveLock.take(self._store, self._root / f"{TEMPORARY}{self._unique}.lock")) is None:
            self._name_anew()
        self._lock = lock
        self._store.make_folder(self.folder)

    def commit(self, manifest: Manifest, *, replace: bool = False) -> Path:
        """Make the folder a checkpoint and give its path; on return it is durable.

        Args:
            manifest: lists every file in the folder.
            replace: take the place of a verified checkpoint of the same step; a damaged one always makes way.

        Raises:
            CheckpointError: when a file is not there as listed, when a verified checkpoint of this step is in the way,
                or when the disk refuses; the checkpoints before it are as they were.
        """
        if manifest.step != self.step:
            raise CheckpointError(f"a manifest of step {manifest.step} cannot make a checkpoint of step {self.step}.")
        for name, digest in manifest.files.items():
            check_file(self.folder, name, digest, hashed=False)
        if not replace:
            self._check_not_in_the_way()
        below = [Path(path) for path, _, _ in os.walk(self.folder) if Path(path) != self.folder]
        for folder in sorted(below, reverse=True):  # inner ones first
            self._store.sync_folder(folder)
        self._store.write_file(self.folder / MANIFEST, manifest.to_bytes())
        self._store.sync_folder(self.folder)
        self._check_not_foreign()
        if os.path.lexists(self.target):
            self._store.rename(self.target, self._superseded)
        self._store.rename(self.folder, self.target)
        self._store.sync_folder(self._root)  # from here on it is a durable checkpoint
        self._store.write_file(self._pointer, f"{self.target.name}\n".encode())
        self._store.rename(self._pointer, self._root / LATEST)
        self._store.sync_folder(self._root)
        self._store.remove_tree(self._superseded)
        self._release()
        return self.target

    def abandon(self) -> None:
        """Remove what the save has left, after a failure; what cannot be removed is left to a later sweep."""
        try:
            if os.path.lexists(self._superseded) and not os.path.lexists(self.target):
                self._store.rename(self._superseded, self.target)
            self._store.remove_tree(self._superseded)
            self._store.remove_tree(self.folder)
            self._store.unlink(self._pointer)
        except CheckpointError as error:
            logger.warning("Leftovers of the save of step %s stay until the next start: %s", self.step, error)
        self._release()

    @property
    def _superseded(self) -> Path:
        return self._root / f"{SUPERSEDED}{self._unique}"

    @property
    def _pointer(self) -> Path:
        return self._root / f"{TEMPORARY}{self._unique}.latest"

    def _release(self) -> None:
        if self._lock is None:
            return
        try:
            self._lock.release()
        except CheckpointError as error:
            logger.warning("A lock file of the save of step %s stays until the next start: %s", self.step, error)

    def _check_not_foreign(self) -> None:
        target = self.target
        if os.path.lexists(target) and (target.is_symlink() or not os.path.lexists(target / MANIFEST)):
            raise CheckpointError(
                f"{target} exists and is no checkpoint (it has no {MANIFEST} of its own); move it away, or save to "
                f"another folder."
            )

    def _check_not_in_the_way(self) -> None:
        if not os.path.lexists(self.target):
            return
        try:
            verify(self.target)
        except CheckpointError as error:
            logger.warning("A damaged checkpoint makes way for one of the same step: %s", error)
        else:
            raise CheckpointError(f"{self.target} exists and is verified; commit with replace=True to take its place.")


def sweep(store: FileStore, root: Path, report: Callable[[str], None] = logger.warning) -> list[Path]:
    """Remove what dead saves and interrupted deletions have left in `root`, and give what was removed.

    Files of a live save, of any process, stay; so does everything that no save made. A checkpoint that had been moved
    aside for one that never came is put back.

    Args:
        store: what touches the files.
        root: the folder of the checkpoints; it may be missing.
        report: told what cannot be removed, and why.
    """
    removed = []
    for path in _leftovers(root):
        try:
            if _sweep_one(store, root, path):
                removed.append(path)
        except CheckpointError as error:
            report(f"A leftover of an earlier save cannot be removed: {error}")
    return removed


def _leftovers(root: Path) -> list[Path]:
    """What our naming says is no checkpoint (yet, or any more); lock files last, since they guard the rest."""
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed ({error.strerror}); see to its permissions.") from error
    ours = [name for name in names if _OF_A_SAVE.fullmatch(name) or _TRASH.fullmatch(name)]
    return [root / name for name in sorted(ours, key=lambda name: name.endswith(".lock"))]


def _sweep_one(store: FileStore, root: Path, path: Path) -> bool:
    """Whether it was removed."""
    match = _OF_A_SAVE.fullmatch(path.name)
    if match is None:
        store.remove_tree(path)
        return True
    if is_held(root / f"{TEMPORARY}{match['save']}.lock"):
        return False
    if match["end"]:
        store.unlink(path)
        return True
    stood_at = root / match["save"].rpartition("-")[0]
    if match["kind"] == "superseded" and not os.path.lexists(stood_at) and os.path.lexists(path / MANIFEST):
        store.rename(path, stood_at)  # the checkpoint that it made way for never came
        store.sync_folder(root)
        return False
    store.remove_tree(path)
    return True
