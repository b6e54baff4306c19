"""Marks the checkpoint that a user's methods write, so that what a kill leaves of it does not pass for a whole one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onstep.checkpoint.storage.manifest import MANIFEST


def _mark(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.unfinished")


@contextmanager
def being_written(directory: str, *, is_main: bool) -> Iterator[None]:
    """Mark a checkpoint's directory as unfinished during the block, on rank 0; an error in it leaves the mark."""
    mark = _mark(Path(directory))
    if is_main:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    yield
    if is_main:
        mark.unlink(missing_ok=True)


def is_unfinished(directory: Path) -> bool:
    """Whether a directory was being written when its process ended, and did not become a checkpoint."""
    return os.path.lexists(_mark(directory)) and not os.path.lexists(directory / MANIFEST)
