"""Builds the trackers that a configuration reports to (`logger.report_to`), with their options."""

from __future__ import annotations

import logging
from typing import Any

from onstep.config import ConfigContainer, LoggerConfig
from onstep.config.trackers import ALL, BRIDGE_FIELDS, DEFAULT_PROJECT, TRACKERS, name_list, tracker_list
from onstep.events import CallbackManager
from onstep.trackers.metric_names import BRIDGE, HF, make_tracker
from onstep.trackers.tracker import Tracker, is_installed
from onstep.trackers.trackers_callback import TrackersCallback

logger = logging.getLogger(__name__)

_PROJECT = {"wandb": "project", "mlflow": "experiment", "comet": "project", "trackio": "project"}
"""Name of each tracker's constructor argument for the project."""


def asked_names(logger: LoggerConfig) -> dict[str, tuple[str, ...]]:
    """The trackers that a configuration requests, with the naming schemes of each.

    Raises:
        ConfigError: for an unknown tracker or naming scheme.
    """
    trackers = tracker_list(logger.report_to, "logger.report_to")
    if trackers == [ALL]:
        trackers = [name for name in TRACKERS if is_installed(name)]
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
    return [make_tracker(name, **_options(name, config)) for name in found]


def tracker_options(name: str, logger: LoggerConfig) -> dict[str, Any]:
    """The options of a tracker set in `logger`, as constructor arguments; unset options are omitted."""
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"log_dir": logger.tensorboard_dir},
        "wandb": {
            "project": logger.wandb_project,
            "run_name": logger.wandb_exp_name,
            "entity": logger.wandb_entity,
            "save_dir": logger.wandb_save_dir,
        },
        "mlflow": {
            "experiment": logger.mlflow_experiment,
            "run_name": logger.mlflow_run_name,
            "tracking_uri": logger.mlflow_tracking_uri,
            "tags": logger.mlflow_tags,
            "description": logger.mlflow_description,
        },
        "comet": {
            "project": logger.comet_project,
            "run_name": logger.comet_experiment_name,
            "workspace": logger.comet_workspace,
            "tags": logger.comet_tags,
        },
    }
    return {key: value for key, value in options.get(name, {}).items() if value is not None}


def _options(name: str, config: ConfigContainer) -> dict[str, Any]:
    """`tracker_options`, which override the options common to all trackers: `trainer.project`, `trainer.run_name`."""
    common: dict[str, Any] = {}
    if name in _PROJECT:
        trainer = config.trainer
        project = trainer.get("project", DEFAULT_PROJECT)
        common = {_PROJECT[name]: None if project == DEFAULT_PROJECT else project, "run_name": trainer.get("run_name")}
        if name == "trackio":
            common |= {"space_id": trainer.get("trackio_space_id"), "bucket_id": trainer.get("trackio_bucket_id")}
    return tracker_options(name, config.logger) | {key: value for key, value in common.items() if value}


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
