"""The one door through which checkpoint files are written: every operation can be logged, failed and replayed."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from blake3 import blake3

from onstep.checkpoint.format.tensor_file import FileDigest
from onstep.errors import CheckpointError
from onstep.heartbeat import PULSE

Result = TypeVar("Result")

HASH_THREADS = min(4, os.cpu_count() or 1)
"""A number and not the library's common pool, which a forked process would wait for in vain."""
HASH_ASIDE_BYTES = 1024**2
"""From this size on a buffer is hashed by a second thread while it is written; below it the hand-over costs more."""
TRASH = ".trash-"
"""Prefix of a folder on its way out: no checkpoint any more, and free to be removed by whoever finds it."""
TEMPORARY = ".tmp-"
"""Prefix of what a save is still writing."""


@dataclass(frozen=True)
class Operation:
    """One change of the file system, told to `on_operation` just before it is made."""

    kind: Literal["mkdir", "open", "write", "fsync", "fsync_folder", "rename", "unlink", "rmdir"]
    path: Path
    target: Path | None = None
    """The new name, of a rename."""
    data: memoryview = field(default=memoryview(b""), repr=False, compare=False)
    """What is written; valid only while the operation is told."""

    @property
    def size(self) -> int:
        """Bytes written."""
        return self.data.nbytes


class FileStore:
    """File operations of one process; may be used from several threads.

    Whatever fails raises a CheckpointError that names the operation, the path and the cause.

    Args:
        on_operation: told each operation before it is made; an OSError that it raises counts as the operation's own.
    """

    def __init__(self, on_operation: Callable[[Operation], None] | None = None) -> None:
        self._on_operation = on_operation

    def make_folder(self, path: Path) -> None:
        """Make a folder; one that exists is fine, other ranks make the same ones."""
        if not _is_folder(path):
            self._do(Operation("mkdir", path), lambda: _make_folder(path))

    def make_root(self, path: Path) -> None:
        """Make a folder with its parents, durably."""
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            self.make_folder(folder)
            self.sync_folder(folder.parent)

    def sync_folder(self, path: Path) -> None:
        """Make the folder's entries durable: what was created, renamed or removed in it."""
        self._do(Operation("fsync_folder", path), lambda: _sync_folder(path))

    def open(self, path: Path) -> StoredFile:
        """Create a file to write; there must be none of that name."""
        return StoredFile(path, self._create(path, os.O_WRONLY), self._do)

    def open_lock(self, path: Path) -> int:
        """Create an empty file to hold a lock on, and give its descriptor."""
        return self._create(path, os.O_RDWR)

    def write_file(self, path: Path, content: bytes) -> FileDigest:
        """Write a whole new file, durably (but for its entry in the folder)."""
        with self.open(path) as file:
            file.write(content)
        return file.digest

    def rename(self, source: Path, target: Path) -> None:
        """Rename within a file system; atomic."""
        self._do(Operation("rename", source, target), lambda: os.rename(source, target))

    def unlink(self, path: Path) -> None:
        """Remove a file or a symbolic link; one that is gone already is fine."""
        self._do(Operation("unlink", path), lambda: path.unlink(missing_ok=True))

    def remove_tree(self, folder: Path) -> None:
        """Remove a folder and all in it, never following a symbolic link; one that is gone already is fine.

        A checkpoint is renamed durably before its first file goes, so that a half-deleted one is none at any moment.
        """
        if not _is_folder(folder):
            return
        if not folder.name.startswith((TRASH, TEMPORARY)):
            folder = self._throw_away(folder)
        self._empty(folder)

    def _create(self, path: Path, access: int) -> int:
        flags = access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return self._do(Operation("open", path), lambda: os.open(path, flags, 0o666))

    def _throw_away(self, folder: Path) -> Path:
        trash = folder.with_name(f"{TRASH}{folder.name.lstrip('.')}-{secrets.token_hex(4)}")
        self.rename(folder, trash)
        self.sync_folder(folder.parent)
        return trash

    def _empty(self, folder: Path) -> None:
        for path, is_folder in sorted(_entries(folder)):
            if is_folder:
                self._empty(path)
            else:
                self.unlink(path)
        self._do(Operation("rmdir", folder), lambda: _remove_folder(folder))

    def _do(self, operation: Operation, act: Callable[[], Result]) -> Result:
        """Every change passes here."""
        try:
            if self._on_operation is not None:
                self._on_operation(operation)
            return act()
        except OSError as error:
            raise CheckpointError(_explained(operation, error)) from error


class StoredFile:
    """A file being written, hashed on the way; as a context manager it is durable when the block ends well."""

    def __init__(
        self, path: Path, descriptor: int, do: Callable[[Operation, Callable[[], int | None]], int | None]
    ) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._do = do
        self._hasher = blake3(max_threads=HASH_THREADS)
        self._size = 0
        self._digest: FileDigest | None = None
        self._aside: ThreadPoolExecutor | None = None

    def write(self, buffer: bytes | bytearray | memoryview, /) -> int:
        """Append all bytes of the buffer, which may be used again when this returns; gives their number."""
        data = memoryview(buffer).cast("B")
        if data.nbytes < HASH_ASIDE_BYTES:
            self._write_all(data)
            self._hasher.update(data)
        else:
            self._write_and_hash(data)
        self._size += data.nbytes
        return data.nbytes

    def close(self) -> None:
        """Make the bytes durable and close the file; closing twice is harmless."""
        if self._descriptor is None:
            return
        descriptor = self._descriptor
        try:
            self._do(Operation("fsync", self.path), lambda: os.fsync(descriptor))
            self._digest = FileDigest(self._size, self._hasher.hexdigest())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is, without a promise; the digest stays unknown."""
        if self._aside is not None:
            self._aside.shutdown()
            self._aside = None
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    @property
    def digest(self) -> FileDigest:
        """Size and hash of what was written, once it is durable.

        Raises:
            CheckpointError: before `close` has succeeded.
        """
        if self._digest is None:
            raise CheckpointError(f"{self.path} is not durable; its digest is known after close().")
        return self._digest

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _write_and_hash(self, data: memoryview) -> None:
        if self._aside is None:
            self._aside = ThreadPoolExecutor(1, thread_name_prefix="onstep-hash")
        hashed = self._aside.submit(self._hasher.update, data)
        try:
            self._write_all(data)
        finally:
            hashed.result()

    def _write_all(self, data: memoryview) -> None:
        if self._descriptor is None:
            raise CheckpointError(f"{self.path} is closed; open a new file to write.")
        descriptor = self._descriptor
        while data.nbytes:
            rest = data
            written = self._do(Operation("write", self.path, data=rest), lambda rest=rest: os.write(descriptor, rest))  # type: ignore[misc]
            data = data[written:]
            PULSE.beats += 1


def _is_folder(path: Path) -> bool:
    """Whether it is a folder itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _make_folder(path: Path) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not _is_folder(path):
            raise


def _remove_folder(path: Path) -> None:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return  # another process sweeps the same debris


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the answer of network file systems that have no such thing as folder fsync
            raise
    finally:
        os.close(descriptor)


def _entries(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Each entry, and whether it is a folder (a link to one is not)."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield Path(entry.path), entry.is_dir(follow_symlinks=False)
    except FileNotFoundError:
        return  # another process sweeps the same debris
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed ({error.strerror}); see to its permissions.") from error


def _explained(operation: Operation, error: OSError) -> str:
    reason = error.strerror or str(error)
    what = f"{operation.kind} of {operation.path}"
    if operation.kind == "write":
        what = f"write of {operation.size} bytes to {operation.path}"
    if operation.target is not None:
        what += f" to {operation.target}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{what} failed: {reason}; see to the disk, then save again."
    try:
        free: int | str = shutil.disk_usage(operation.path.parent).free
    except OSError:
        free = "unknown"
    needed = f"{operation.size} bytes are needed, {free} bytes are free"
    return f"{what} failed: {reason}; {needed}: make room, or keep fewer checkpoints."
