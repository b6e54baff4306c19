"""Keeps the files of a directory readable while others delete it: by hard links, or copies where there are none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link_tree(source: Path, target: Path) -> bool:
    """Make `target` a directory with links to the files of `source`, which nobody changes in place.

    Args:
        source: a directory that may be deleted meanwhile.
        target: does not exist; on a file system without links, its files are copies.

    Returns:
        False, without a `target`, if `source` is gone by now.

    Raises:
        OSError: if the files can be neither linked nor copied.
    """
    try:
        shutil.copytree(source, target, copy_function=link)
    except (FileNotFoundError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        return False
    return True


def link(source: str, target: str) -> None:
    """Make `target` another name of the file `source`; a copy of it, on a file system without links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without links
        shutil.copy2(source, target)
