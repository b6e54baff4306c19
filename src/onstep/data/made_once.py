"""Files in the user's cache that one process makes and all others wait for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from onstep.errors import DataError

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

_HEAD_START_SECONDS = 5.0
"""How long a process that shall wait for another lets it go first; after that it takes part like any other."""
_POLL_SECONDS = 0.1


def made_once(path: Path, find: Callable[[], T | None], make: Callable[[], T], *, wait_for_other: bool = False) -> T:
    """What `find` gives, or what `make` makes under a lock where it gives None.

    Any number of processes may call this at once, for the same `path`; ``wait_for_other`` lets another go first (the
    one that shows the progress bar).

    Raises:
        DataError: where the folder of `path` cannot be written to.
    """
    found = _wait_for(find) if wait_for_other else find()
    if found is not None:
        return found
    with _writing_to(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            found = find()
            return make() if found is None else found


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder that `dataset.cache_dir` means."""
    return default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()


def default_cache_dir() -> Path:
    """`$ONSTEP_CACHE`, else `onstep` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own, shared = os.environ.get("ONSTEP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "onstep"


def _wait_for(find: Callable[[], T | None]) -> T | None:
    deadline = time.monotonic() + _HEAD_START_SECONDS
    while (found := find()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=1.0, poll_interval=_POLL_SECONDS)
    except Timeout:
        _LOGGER.info("waiting for another process that makes %s", path)
        lock.acquire(poll_interval=_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot keep token files in {str(folder)!r}: {error.strerror or error}; set dataset.cache_dir or "
            "ONSTEP_CACHE to a folder that can be written to and has room"
        ) from error
