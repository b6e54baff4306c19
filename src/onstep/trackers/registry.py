"""Finds the class of each tracker by name, and creates trackers."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from onstep.config.trackers import TRACKERS
from onstep.errors import ConfigError
from onstep.trackers.tracker import Tracker, TrackerClass


def tracker_class(name: str) -> TrackerClass:
    """The class with this name in `services/<name>_tracker.py`, which is imported on first use.

    Raises:
        ConfigError: for an unknown tracker, suggesting the nearest name.
    """
    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name!r} is not a tracker; use one of {', '.join(TRACKERS)}.{meant}")
    module = import_module(f"onstep.trackers.services.{name}_tracker")
    found: TrackerClass = next(kind for kind in vars(module).values() if getattr(kind, "name", None) == name)
    return found


def make_tracker(name: str, **options: Any) -> Tracker:
    """Create a tracker by name; `options` are passed to its constructor.

    Args:
        name: the name of the tracker, as in `report_to`.

    Raises:
        ConfigError: for an unknown tracker, suggesting the nearest name, and for unknown options.
    """
    make = tracker_class(name)
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(
            f"The tracker {name!r} cannot be created with the options {sorted(options)}: {error}."
        ) from error


_METHODS = ("open", "log", "text", "state_dict", "close")


def check_tracker(tracker: Any) -> None:
    """Check that an object implements `Tracker`.

    Args:
        tracker: any object.

    Raises:
        ConfigError: if it is a class, or lacks a name or one of the methods.
    """
    if isinstance(tracker, type):
        raise ConfigError(f"{tracker.__name__} is a class; pass an instance: {tracker.__name__}(...).")
    if not isinstance(getattr(tracker, "name", None), str):
        raise ConfigError(f"{tracker!r} is not a tracker: it has no `name`; add a class attribute name = '...'.")
    missing = [method for method in _METHODS if not callable(getattr(tracker, method, None))]
    if missing:
        raise ConfigError(
            f"{tracker!r} is not a tracker: it lacks {', '.join(missing)}; a tracker has {', '.join(_METHODS)}."
        )
