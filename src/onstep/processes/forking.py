"""Releases what forked children share with their parent, and stops spawned ones that import its script."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from onstep.errors import ConfigError

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


def check_imports_are_done() -> None:
    """Check that this process is not a worker that is still importing the script which started it.

    Raises:
        ConfigError: if it is: a start method other than fork imports the script, which would train again.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself checks it
        raise ConfigError(
            "a worker process imports the script that started it (multiprocessing's start method is not fork), and "
            'training would start in it again; put what starts the training under if __name__ == "__main__":'
        )
