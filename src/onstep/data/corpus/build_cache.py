"""Builds files in the user's cache, keyed by their sources: one process builds a file, all others wait for it."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from filelock import FileLock, Timeout

from onstep.errors import DataError
from onstep.files.durability import replacing
from onstep.stores.urls import cache_directory

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

_HEAD_START_SECONDS = 5.0
"""How long a process that defers to another waits before competing for the lock itself."""
_POLL_SECONDS = 0.1


class Source(Protocol):
    """The source that a cached file is built from."""

    @property
    def name(self) -> str:
        """Name used in messages."""

    def add_to(self, digest: Any) -> None:
        """Update the hash `digest` with everything the content depends on.

        Raises:
            DataError: if the source cannot be read.
        """


def build_cached(
    source: Source,
    described: str,
    suffix: str,
    cache_dir: str | Path | None,
    find: Callable[[Path], T | None],
    make: Callable[[Path], T],
    *,
    wait_for_other: bool = False,
) -> T:
    """Return `find(path)`, or build the file with `make(path)` under a lock if that returns None.

    Any number of processes may call this concurrently; ``wait_for_other`` lets another process go first (the one that
    shows the progress bar).

    Args:
        described: whatever the content depends on besides `source`; the file name is a hash of both.
        cache_dir: None means `default_cache_dir()`.

    Raises:
        DataError: if the source cannot be read or the cache cannot be written.
    """
    digest = hashlib.blake2b(described.encode(), digest_size=16)
    source.add_to(digest)
    directory = default_cache_dir() if cache_dir is None else Path(os.path.expanduser(cache_dir))
    path = directory / f"{digest.hexdigest()}{suffix}"
    deadline = time.monotonic() + (_HEAD_START_SECONDS if wait_for_other else 0.0)
    while (found := find(path)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(path):
            found = find(path)
            return make(path) if found is None else found
    except OSError as error:
        raise DataError(
            f"cannot write token files to {str(directory)!r}: {error.strerror or error}; set dataset.cache_dir or "
            "ONSTEP_CACHE to a writable directory with enough free space"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def default_cache_dir() -> Path:
    """`$ONSTEP_CACHE`, or else `onstep` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return cache_directory()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from making a file of a cache meanwhile."""
    path.with_suffix(".lock").touch()  # `FileLock` waits, as for another process, where it cannot create the file
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=1.0, poll_interval=_POLL_SECONDS)
    except Timeout:
        _LOGGER.info("waiting for another process to make %s", path)
        lock.acquire(poll_interval=_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()
