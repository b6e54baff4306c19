"""The callbacks that a Trainer adds by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from onstep.callbacks import DefaultMetrics, PrinterCallback, ProgressCallback
from onstep.config import ConfigContainer
from onstep.console import level_of, shown_by_default
from onstep.events import CallbackManager, DefaultFlowCallback, normalize_callbacks
from onstep.originals import ORIGINALS
from onstep.trainer.default_names import ADDED, PRINTER, PROGRESS

_KNOWN = (ProgressCallback, PrinterCallback, DefaultFlowCallback)


def default_callbacks(config: ConfigContainer, *, shows_bars: bool) -> list[object]:
    """DefaultMetrics and what shows the progress, or what a script has set in their place in `transformers.trainer`.

    Raises:
        ConfigError: for an unknown level of the console.
    """
    shown: list[object] = list(shown_by_default(level_of(config), use_tqdm=None if shows_bars else False))
    added, progress = _set_by_script(shows_bars)
    if progress is not None:
        shown = [progress, *(one for one in shown if not isinstance(one, ProgressCallback))]
    return [*added, DefaultMetrics(), *shown]


def _set_by_script(shows_bars: bool) -> tuple[list[object], object]:
    """What a script has set as `DEFAULT_CALLBACKS`, and in place of the progress, where names are exchanged."""
    module = sys.modules.get("transformers.trainer")
    names: dict[str, Any] = {} if module is None else vars(module)
    if ORIGINALS not in names:
        return [], None
    added = [one() if isinstance(one, type) else one for one in names.get(ADDED, ()) if one not in _KNOWN]
    progress = names.get(PROGRESS if shows_bars else PRINTER, ProgressCallback)
    is_own = progress in _KNOWN or progress.__module__.startswith("transformers.")
    return added, None if is_own else progress()


def with_defaults(callbacks: object, defaults: Sequence[object]) -> CallbackManager:
    """A manager with the defaults first, then the user's; an instance of a default's class replaces that default.

    A user's own `CallbackManager` is extended, not copied, so that callbacks registered later count too.
    """
    manager = normalize_callbacks(callbacks) or CallbackManager()
    first = manager.callbacks[0] if manager.callbacks else None
    for default in defaults:
        if not any(isinstance(callback, type(default)) for callback in manager.callbacks):
            manager.add(default, before=first)
    return manager
