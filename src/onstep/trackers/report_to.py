"""Builds the trackers that a configuration reports to (`logger.report_to`), with their options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from onstep.config import ConfigContainer, LoggerConfig
from onstep.config.trackers import ALL, BRIDGE_FIELDS, DEFAULT_PROJECT, TRACKERS, name_list, tracker_list
from onstep.events import CallbackManager
from onstep.trackers.metric_names import BRIDGE, HF
from onstep.trackers.registry import make_tracker, tracker_class
from onstep.trackers.tracker import Tracker, is_installed
from onstep.trackers.trackers_callback import TrackersCallback

logger = logging.getLogger(__name__)

_UNSET = ("project", DEFAULT_PROJECT)
"""The default of a Trainer's argument, which leaves the project to the tracker."""


def asked_names(logger: LoggerConfig) -> dict[str, tuple[str, ...]]:
    """The trackers that a configuration requests, with the naming schemes of each.

    Raises:
        ConfigError: for an unknown tracker or naming scheme.
    """
    trackers = tracker_list(logger.report_to, "logger.report_to")
    if trackers == [ALL]:
        trackers = [name for name in TRACKERS if is_installed(tracker_class(name).package)]
    chosen = name_list(logger.report_names)
    by_field = [name for name, field in BRIDGE_FIELDS.items() if getattr(logger, field) is not None]
    names = dict.fromkeys(by_field, chosen or (BRIDGE,)) | dict.fromkeys(trackers, chosen or (HF,))
    return {name: names[name] for name in dict.fromkeys((*trackers, *by_field))}


def reporting_trackers(config: ConfigContainer) -> list[Tracker]:
    """Create the trackers that `TrackersCallback` fills, without opening them.

    These are the trackers of `logger.report_to`, and any other that shows Hugging Face's names.

    Raises:
        ConfigError: for an unknown tracker, and for one whose package is not installed, with the command to install it.
    """
    named = tracker_list(config.logger.report_to, "logger.report_to")
    asked = asked_names(config.logger)
    found = [name for name, names in asked.items() if HF in names or name in named or named == [ALL]]
    return [make_tracker(name, **tracker_options(name, config.logger, config.trainer)) for name in found]


def tracker_options(name: str, logger: LoggerConfig, trainer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options of a tracker that a configuration sets, as constructor arguments.

    Args:
        trainer: The configuration's section of that name, with the options common to all trackers (`project`,
            `run_name`); None leaves them out.
    """
    values = {
        argument: [_value_of(key, logger, trainer or {}) for key in keys]
        for argument, keys in tracker_class(name).options.items()
    }
    given = {argument: [value for value in found if value is not None] for argument, found in values.items()}
    return {argument: found[0] for argument, found in given.items() if found}


def _value_of(key: str, logger: LoggerConfig, trainer: Mapping[str, Any]) -> Any:
    section, _, name = key.partition(".")
    if section == "logger":
        return getattr(logger, name)
    value = trainer.get(name)
    return value if value and (name, value) != _UNSET else None


def attach_trackers(callbacks: CallbackManager | None, config: ConfigContainer) -> CallbackManager | None:
    """Register `TrackersCallback` for the trackers of a configuration, unless a `TrackersCallback` is already
    registered.

    Returns:
        The manager; a new one if there was none and something is registered.

    Raises:
        ConfigError: for an unknown tracker, and for one whose package is not installed.
    """
    registered = callbacks.callbacks if callbacks is not None else []
    fed = [one.name for own in registered if isinstance(own, TrackersCallback) for one in own.trackers]
    if any(isinstance(callback, TrackersCallback) for callback in registered):
        left_out = [name for name in asked_names(config.logger) if name not in fed]
        if left_out:
            logger.warning(
                "logger.report_to: %s gets no points, since a TrackersCallback with %s is registered; add it there",
                ", ".join(left_out),
                ", ".join(fed),
            )
        return callbacks
    trackers = reporting_trackers(config)
    if trackers:
        callbacks = CallbackManager() if callbacks is None else callbacks
        callbacks.add(TrackersCallback(trackers, names=asked_names(config.logger)))
    return callbacks
