"""Commits a save atomically: files go to a temporary directory, which a single rename turns into a checkpoint."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

from filelock import lock_descriptor

from onstep.checkpoint.storage.manifest import MANIFEST, Manifest, check_file, read_manifest, verify
from onstep.checkpoint.storage.store import TEMPORARY, TRASH, FileStore
from onstep.errors import CheckpointError
from onstep.files.durability import is_still_at
from onstep.processes.forking import release_in_forked_children

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""Error codes of file systems that do not support locks."""


class SaveLock:
    """A lock file next to the temporary directory of a save, held until `release` or the end of the process."""

    def __init__(self, store: FileStore, path: Path, descriptor: int) -> None:
        self.path = path
        self._store = store
        self._descriptor: int | None = descriptor
        release_in_forked_children(self, SaveLock._close)

    @classmethod
    def take(cls, store: FileStore, path: Path) -> SaveLock | None:
        """Create the lock file and lock it; None if a sweep grabbed it in between: retry with another name."""
        descriptor = store.open_lock(path)
        lock = cls(store, path, descriptor)
        if _try_lock(path, descriptor) and is_still_at(path, descriptor):
            return lock
        lock._close()
        return None

    def release(self) -> None:
        """Remove the lock file and release the lock; releasing twice is harmless."""
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
    """False if another process holds the lock; True on a file system without locks, where sweeps do not touch it."""
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise CheckpointError(f"cannot lock {path}: {error.strerror}; check the file system.") from error
    return True


def is_held(path: Path) -> bool:
    """Whether a live save holds the lock file; on a file system without locks, whether the file exists."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # no permission to open it: keep what may be alive
    try:
        return not lock_descriptor(descriptor, blocking=False)
    except OSError:
        return True  # unknown: keep what may be alive
    finally:
        os.close(descriptor)


LATEST = "latest"
"""File that names the newest checkpoint: a hint for people and scripts, never trusted by Onstep itself."""
SUPERSEDED = ".superseded-"
"""Prefix of a checkpoint moved aside for a new one of the same step."""
_OF_A_SAVE = re.compile(r"\.(?P<kind>tmp|superseded)-(?P<save>checkpoint-[0-9]+-[0-9a-f]{8})(?P<end>|\.lock|\.latest)")
_TRASH = re.compile(re.escape(TRASH) + r".+-[0-9a-f]{8}")


class SaveTransaction:
    """The save of one step, on the process that commits it.

    Call `prepare`, write all files below `directory` (from any rank), then call `commit`, or `abandon` after a failure.
    A lock file next to the directory keeps sweeps of other processes away from it.

    Args:
        store: through which all files are written, renamed and removed.
        root: the directory of the run's checkpoints.
        step: the step (optimizer updates) that the checkpoint is of.
        names_latest: whether the file `latest` names it, a hint; False where the directory holds other things.
    """

    def __init__(self, store: FileStore, root: Path, step: int, *, names_latest: bool = True) -> None:
        """`names_latest`: write the hint `latest`, in a directory that belongs to checkpoints alone."""
        self.step = step
        self._names_latest = names_latest
        self._store = store
        self._root = root
        self._lock: SaveLock | None = None
        self._adopted: list[str] = []
        self._pick_name()

    def _pick_name(self) -> None:
        self._unique = f"checkpoint-{self.step}-{secrets.token_hex(4)}"

    @property
    def directory(self) -> Path:
        """Directory to write the files to; unique to this save."""
        return self._root / f"{TEMPORARY}{self._unique}"

    @property
    def target(self) -> Path:
        """The directory's final path as a checkpoint."""
        return self._root / f"checkpoint-{self.step}"

    def prepare(self, *, adopts: bool = False, own: Collection[str] = ()) -> None:
        """Create and lock the directory.

        Args:
            adopts: take over the files of other code that are in a directory with the target's name.
            own: names that the save itself will write, which are not taken over.

        Raises:
            CheckpointError: if something that is not a checkpoint has the target's name, or on an I/O error.
        """
        if not adopts or self.target.is_symlink() or not self.target.is_dir():
            self._check_not_foreign()
        self._store.make_root(self._root)
        while (lock := SaveLock.take(self._store, self._root / f"{TEMPORARY}{self._unique}.lock")) is None:
            self._pick_name()
        self._lock = lock
        self._store.make_dir(self.directory)
        if adopts:
            self._adopt(own)

    def commit(self, manifest: Manifest, *, replace: bool = False) -> Path:
        """Turn the directory into a checkpoint and return its path; the checkpoint is durable on return.

        Args:
            manifest: lists every file in the directory.
            replace: replace a verified checkpoint of the same step; a damaged one is always replaced.

        Raises:
            CheckpointError: if a file is not present as listed, if a verified checkpoint of this step exists, or on an
                I/O error; earlier checkpoints are left untouched.
        """
        if manifest.step != self.step:
            raise CheckpointError(f"cannot commit a checkpoint of step {self.step} with a manifest of {manifest.step}.")
        for name, digest in manifest.files.items():
            check_file(self.directory, name, digest, hashed=False)
        if not replace:
            self._check_not_in_the_way()
        below = [Path(path) for path, _, _ in os.walk(self.directory) if Path(path) != self.directory]
        for directory in sorted(below, reverse=True):  # inner ones first
            self._store.sync_dir(directory)
        self._store.write_file(self.directory / MANIFEST, manifest.to_bytes())
        self._store.sync_dir(self.directory)
        self._check_not_foreign()
        if os.path.lexists(self.target):
            self._store.rename(self.target, self._superseded)
        self._store.rename(self.directory, self.target)
        self._store.sync_dir(self._root)  # from here on, the checkpoint is durable
        if self._names_latest:
            self._store.write_file(self._pointer, f"{self.target.name}\n".encode())
            self._store.rename(self._pointer, self._root / LATEST)
            self._store.sync_dir(self._root)
        self._store.remove_tree(self._superseded)
        self._release()
        return self.target

    def abandon(self) -> None:
        """Clean up after a failed save; whatever cannot be removed is left to a later sweep."""
        try:
            if os.path.lexists(self._superseded) and not os.path.lexists(self.target):
                self._store.rename(self._superseded, self.target)
            self._store.remove_tree(self._superseded)
            self._give_back()
            self._store.remove_tree(self.directory)
            self._store.unlink(self._pointer)
        except CheckpointError as error:
            logger.warning("Leftovers of the save of step %s remain until the next start: %s", self.step, error)
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
            logger.warning("A lock file of the save of step %s remains until the next start: %s", self.step, error)

    def _check_not_foreign(self) -> None:
        target = self.target
        if os.path.lexists(target) and (target.is_symlink() or not os.path.lexists(target / MANIFEST)):
            raise CheckpointError(
                f"{target} exists and is not a checkpoint (it does not contain a {MANIFEST}); move it away, or save to "
                f"another directory."
            )

    def _adopt(self, own: Collection[str]) -> None:
        """Move what is in the target's directory into this one; copy it if a checkpoint is there, which stays whole."""
        target = self.target
        if target.is_symlink() or not target.is_dir():
            return
        names = {path.name for path in target.iterdir()} - set(own)
        if os.path.lexists(target / MANIFEST):
            try:
                components = read_manifest(target).components.values()
            except CheckpointError:  # damaged: it is replaced as a whole
                return
            of_components = {Path(name).parts[0] for entry in components for name in entry.files}
            for name in sorted(names - of_components - {MANIFEST}):
                self._store.copy(target / name, self.directory / name)
            return
        for name in sorted(names):
            self._store.rename(target / name, self.directory / name)
            self._adopted.append(name)
        self._store.remove_tree(target)

    def _give_back(self) -> None:
        """Move what was adopted back to where it was."""
        if self._adopted and not self.target.exists():
            self._store.make_dir(self.target)
        while self._adopted:
            name = self._adopted.pop()
            self._store.rename(self.directory / name, self.target / name)

    def _check_not_in_the_way(self) -> None:
        if not os.path.lexists(self.target):
            return
        try:
            verify(self.target)
        except CheckpointError as error:
            logger.warning("Replacing a damaged checkpoint of the same step: %s", error)
        else:
            raise CheckpointError(f"{self.target} exists and is verified; commit with replace=True to replace it.")


def sweep(store: FileStore, root: Path, report: Callable[[str], None] = logger.warning) -> list[Path]:
    """Remove leftovers of dead saves and interrupted deletions from `root`, and return what was removed.

    Files of a live save of any process are kept, and so is everything that was not made by a save. A checkpoint that
    was moved aside for one that never completed is restored.

    Args:
        store: performs the file operations.
        root: directory of the checkpoints; it may be missing.
        report: called with a message for whatever cannot be removed.
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
    """Paths whose names mark them as not (or no longer) a checkpoint; lock files last, since they guard the rest."""
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list {root}: {error.strerror}; check its permissions.") from error
    ours = [name for name in names if _OF_A_SAVE.fullmatch(name) or _TRASH.fullmatch(name)]
    return [root / name for name in sorted(ours, key=lambda name: name.endswith(".lock"))]


def _sweep_one(store: FileStore, root: Path, path: Path) -> bool:
    """Remove one leftover; False if it was kept or restored."""
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
        store.rename(path, stood_at)  # its replacement never completed
        store.sync_dir(root)
        return False
    store.remove_tree(path)
    return True
