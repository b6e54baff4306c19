"""Performs all file operations of checkpoint writing, so that each can be logged, made to fail, and replayed."""

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
from onstep.files.durability import sync_dir
from onstep.processes.heartbeat import HEARTBEAT

Result = TypeVar("Result")

HASH_THREADS = min(4, os.cpu_count() or 1)
"""Explicit, to avoid BLAKE3's shared pool, on which a forked process would hang."""
HASH_ASIDE_BYTES = 1024**2
"""Buffers of at least this size are hashed in a second thread while being written; for smaller ones it costs more."""
TRASH = ".trash-"
"""Prefix of a directory being deleted: no longer a checkpoint, and may be removed by any process that finds it."""
TEMPORARY = ".tmp-"
"""Prefix of a directory that a save is still writing."""


@dataclass(frozen=True)
class Operation:
    """One change of the file system, passed to `on_operation` just before it is made."""

    kind: Literal["mkdir", "open", "write", "fsync", "fsync_dir", "copy", "rename", "unlink", "rmdir"]
    """What is done to the file."""
    path: Path
    """The file or directory."""
    target: Path | None = None
    """The new name, for a rename or a copy."""
    data: memoryview = field(default=memoryview(b""), repr=False, compare=False)
    """The bytes to write; valid only during the call of `on_operation`."""

    @property
    def size(self) -> int:
        """Number of bytes to write."""
        return self.data.nbytes


class FileStore:
    """File operations of one process; thread-safe.

    A failing operation raises a CheckpointError that names the operation, the path and the cause.

    Args:
        on_operation: called with each operation before it is made; an OSError it raises counts as the operation's own.
    """

    def __init__(self, on_operation: Callable[[Operation], None] | None = None) -> None:
        self._on_operation = on_operation

    def make_dir(self, path: Path) -> None:
        """Create a directory; it may already exist, since other ranks create the same ones.

        Args:
            path: the path of the file or directory.
        """
        if not _is_dir(path):
            self._do(Operation("mkdir", path), lambda: _make_dir(path))

    def make_root(self, path: Path) -> None:
        """Create a directory and its parents, durably.

        Args:
            path: the path of the file or directory.
        """
        missing = [directory for directory in (path, *path.parents) if not directory.exists()]
        for directory in reversed(missing):
            self.make_dir(directory)
            self.sync_dir(directory.parent)

    def sync_dir(self, path: Path) -> None:
        """Make the directory's entries durable, i.e. creations, renames and removals in it.

        Args:
            path: the path of the file or directory.
        """
        self._do(Operation("fsync_dir", path), lambda: sync_dir(path))

    def open(self, path: Path) -> StoredFile:
        """Create a file for writing; it must not exist yet.

        Args:
            path: the path of the file or directory.
        """
        return StoredFile(path, self._create(path, os.O_WRONLY), self._do)

    def open_lock(self, path: Path) -> int:
        """Create an empty lock file and return its descriptor.

        Args:
            path: the path of the file or directory.
        """
        return self._create(path, os.O_RDWR)

    def write_file(self, path: Path, content: bytes) -> FileDigest:
        """Write a complete new file, durably (except for its directory entry).

        Args:
            path: the path of the file or directory.
            content: the bytes to write.
        """
        with self.open(path) as file:
            file.write(content)
        return file.digest

    def adopt(self, path: Path) -> FileDigest:
        """Make a file durable that others have written (except for its directory entry).

        Args:
            path: the path of the file or directory.
        """

        def sync() -> FileDigest:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                hasher = blake3(max_threads=HASH_THREADS)
                while block := file.read(HASH_ASIDE_BYTES):
                    hasher.update(block)
                return FileDigest(file.tell(), hasher.hexdigest())

        return self._do(Operation("fsync", path), sync)

    def copy(self, source: Path, target: Path) -> None:
        """Copy a file or a directory; a link is copied as such. Not durable by itself.

        Args:
            source: the existing path.
            target: the new path.
        """
        operation = Operation("copy", source, target)
        if _is_dir(source):
            self._do(operation, lambda: shutil.copytree(source, target, symlinks=True))
        else:
            self._do(operation, lambda: shutil.copy2(source, target, follow_symlinks=False))

    def rename(self, source: Path, target: Path) -> None:
        """Rename within a file system; atomic.

        Args:
            source: the existing path.
            target: the new path.
        """
        self._do(Operation("rename", source, target), lambda: os.rename(source, target))

    def unlink(self, path: Path) -> None:
        """Remove a file or symbolic link; it may already be gone.

        Args:
            path: the path of the file or directory.
        """
        self._do(Operation("unlink", path), lambda: path.unlink(missing_ok=True))

    def remove_tree(self, directory: Path) -> None:
        """Remove a directory tree, never following symbolic links; it may already be gone.

        A checkpoint is durably renamed before its first file is removed, so a half-deleted one never counts as one.

        Args:
            directory: the directory to remove, with what is below it.
        """
        if not _is_dir(directory):
            return
        if not directory.name.startswith((TRASH, TEMPORARY)):
            directory = self._move_to_trash(directory)
        self._empty(directory)

    def _create(self, path: Path, access: int) -> int:
        flags = access | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return self._do(Operation("open", path), lambda: os.open(path, flags, 0o666))

    def _move_to_trash(self, directory: Path) -> Path:
        trash = directory.with_name(f"{TRASH}{directory.name.lstrip('.')}-{secrets.token_hex(4)}")
        self.rename(directory, trash)
        self.sync_dir(directory.parent)
        return trash

    def _empty(self, directory: Path) -> None:
        for path, is_dir in sorted(_entries(directory)):
            if is_dir:
                self._empty(path)
            else:
                self.unlink(path)
        self._do(Operation("rmdir", directory), lambda: _remove_dir(directory))

    def _do(self, operation: Operation, act: Callable[[], Result]) -> Result:
        """Perform an operation; every change goes through here."""
        try:
            if self._on_operation is not None:
                self._on_operation(operation)
            return act()
        except OSError as error:
            raise CheckpointError(_explained(operation, error)) from error


class StoredFile:
    """A file being written and hashed; as a context manager it is durable when the block exits without an error."""

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
        """Append all bytes of the buffer and return their number; the buffer may be reused afterwards."""
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
        """Close the file as it is, without making it durable; the digest stays unknown."""
        if self._aside is not None:
            self._aside.shutdown()
            self._aside = None
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    @property
    def digest(self) -> FileDigest:
        """Size and hash of the contents, available once they are durable.

        Raises:
            CheckpointError: before `close` has succeeded.
        """
        if self._digest is None:
            raise CheckpointError(f"{self.path} is not durable yet; its digest is available after close().")
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
            raise CheckpointError(f"{self.path} is closed; open a new file to write to.")
        descriptor = self._descriptor
        while data.nbytes:
            rest = data
            written = self._do(Operation("write", self.path, data=rest), lambda rest=rest: os.write(descriptor, rest))  # type: ignore[misc]
            data = data[written:]
            HEARTBEAT.beats += 1


def _is_dir(path: Path) -> bool:
    """Whether the path is a directory itself, not a link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _make_dir(path: Path) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        if not _is_dir(path):
            raise


def _remove_dir(path: Path) -> None:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return  # another process is sweeping the same leftovers


def _entries(directory: Path) -> Iterator[tuple[Path, bool]]:
    """Each entry, and whether it is a directory (a link to one is not)."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                yield Path(entry.path), entry.is_dir(follow_symlinks=False)
    except FileNotFoundError:
        return  # another process is sweeping the same leftovers
    except OSError as error:
        raise CheckpointError(f"cannot list {directory}: {error.strerror}; check its permissions.") from error


def _explained(operation: Operation, error: OSError) -> str:
    reason = error.strerror or str(error)
    what = f"{operation.kind} of {operation.path}"
    if operation.kind == "write":
        what = f"write of {operation.size} bytes to {operation.path}"
    if operation.target is not None:
        what += f" to {operation.target}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{what} failed: {reason}; check the disk, then save again."
    try:
        free: int | str = shutil.disk_usage(operation.path.parent).free
    except OSError:
        free = "unknown"
    needed = f"{operation.size} bytes are needed, {free} bytes are free"
    return f"{what} failed: {reason}; {needed}: free up space or keep fewer checkpoints."
