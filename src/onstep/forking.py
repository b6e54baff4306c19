"""Releases locks and files of the parent in forked children."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

_releases: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
"""Objects to release in every child, and how. Process-wide, because a fork copies the whole process."""


def release_in_forked_children(holder: Any, release: Callable[[Any], None]) -> None:
    """Call `release(holder)` in every child forked during the lifetime of `holder`, such as a data loader's worker.

    A child shares its parent's locks and descriptors, and would otherwise hold them after the parent has died.
    """
    _register_once()
    _releases[holder] = release


@cache
def _register_once() -> None:
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for holder, release in list(_releases.items()):
        release(holder)
