"""The callbacks that a Trainer has unless told otherwise."""

from __future__ import annotations

from typing import Any

from onstep.callbacks import DefaultMetrics, InfoCallback, ProgressCallback
from onstep.events import CallbackManager, normalize_callbacks


def with_defaults(callbacks: Any, wanted: bool, *, disable_tqdm: bool) -> CallbackManager:
    """A manager with the defaults first, then the user's; an instance of a default's class takes its place.

    A `CallbackManager` of the user's is completed, not copied, so that what is registered with it later counts too.
    """
    manager = normalize_callbacks(callbacks) or CallbackManager()
    if not wanted:
        return manager
    progress = ProgressCallback(use_tqdm=False) if disable_tqdm else ProgressCallback()
    first = manager.callbacks[0] if manager.callbacks else None
    for default in (DefaultMetrics(), progress, InfoCallback()):
        if not any(isinstance(callback, type(default)) for callback in manager.callbacks):
            manager.add(default, before=first)
    return manager
