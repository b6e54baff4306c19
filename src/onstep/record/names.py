"""Finds unused names beside a metrics log, and renames it to one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path


def rename_aside(path: Path, label: str) -> Path:
    """Rename a file or directory to ``<name>.<label><n>.json`` with the first free number; returns the new path."""
    name = free_name(path, label)
    os.replace(path, name)
    return name


def free_name(path: Path, label: str) -> Path:
    """An unused name like ``<name>.<label><n>.json``, reserved against other processes by an empty file or
    directory.
    """
    names = _names(path, label)
    while True:
        name = next(names)
        with suppress(FileExistsError):
            if path.is_dir() and not path.is_symlink():
                name.mkdir()
            else:
                name.touch(exist_ok=False)
            return name


def numbered_name(path: str | Path) -> Path:
    """The first of ``<name>.1.json``, ``<name>.2.json``, ... that does not exist."""
    return next(name for name in _names(Path(path), "") if not name.exists())


def _names(path: Path, label: str) -> Iterator[Path]:
    """``<name>.<label>1.json``, ``<name>.<label>2.json``, ..."""
    return (path.with_name(f"{path.stem}.{label}{number}{path.suffix}") for number in count(1))
