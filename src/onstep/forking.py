"""What a forked child must not keep: locks and files that belong to its parent."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

_releases: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
"""What every child lets go of, and how. One for the process, because a fork is of the whole process."""


def release_in_forked_children(holder: Any, release: Callable[[Any], None]) -> None:
    """Call `release(holder)` in every child that is forked while `holder` lives, such as a data loader's worker.

    A child shares its parent's locks and descriptors, and would hold them after the parent's death.
    """
    _register_once()
    _releases[holder] = release


@cache
def _register_once() -> None:
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for holder, release in list(_releases.items()):
        release(holder)
