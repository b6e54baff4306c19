"""Makes files and directory entries durable, so that they survive a power failure."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger: logging.Logger = logging.getLogger(__name__)


def sync_file(path: Path) -> None:
    """Make the content of a file and its directory entry durable; other threads may be writing to it.

    Raises:
        OSError: if the file does not exist, or the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a named pipe would wait for a writer
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_dir(path.parent)


def is_still_at(path: Path, descriptor: int | None) -> bool:
    """Whether an open file is the one at this path: nobody has removed, moved or replaced it."""
    try:
        return descriptor is not None and os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def sync_dir(path: Path) -> None:
    """Make the entries of a directory durable.

    Raises:
        OSError: if the disk refuses; not on network file systems that do not support this.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def append_all(descriptor: int, data: bytes) -> None:
    """Append to a file that no other process writes to: all of it, or nothing if the disk refuses.

    Raises:
        OSError: if the disk refuses; the file is as before.
    """
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def replace_durably(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replace a file: a crash leaves the old or the new one. A link in place of either is replaced, not followed.

    Args:
        content: bytes, or text that is written as UTF-8.
        mode: permissions of the new file, less those that the umask withholds.

    Raises:
        OSError: if that is impossible; the file is then as before.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a killed process
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that replaces another one at the end of the block, unless that fails.

    Raises:
        OSError: if that is impossible; the file is then as before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def try_to_sync(path: Path, descriptor: int | None = None) -> bool:
    """Do as `sync_file`; a refusal is logged. Returns whether the file is durable.

    Args:
        path: the file; a missing one is not a refusal, as its directory may be renamed at any time.
        descriptor: of the open file, which is synced also where its directory was renamed.
    """
    try:
        if descriptor is None:
            sync_file(path)
        else:
            os.fsync(descriptor)
            sync_dir(path.parent)
    except FileNotFoundError:
        return descriptor is not None
    except OSError as error:
        logger.warning(
            "%s could not be made durable (%s); until that works, a power failure can cost its newest entries. Check "
            "its disk.",
            path,
            error,
        )
        return False
    return True
