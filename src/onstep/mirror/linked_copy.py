"""Keeps the files of a checkpoint readable while it is uploaded, though retention may delete it meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onstep.files.links import link_tree


@contextmanager
def linked(source: Path, place: Path) -> Iterator[Path | None]:
    """A directory with links to the files of a checkpoint; None if it is gone by now.

    Args:
        source: the checkpoint.
        place: the directory to make, on the same disk.
    """
    shutil.rmtree(place, ignore_errors=True)
    try:
        yield place if link_tree(source, place) else None
    finally:
        shutil.rmtree(place, ignore_errors=True)
