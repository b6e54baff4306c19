"""The trackers that a configuration reports to (`logger.report_to`), with the options that it has for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onstep.config import ConfigContainer, LoggerConfig
from onstep.config.trackers import ALL, DEFAULT_PROJECT, TRACKERS, tracker_list
from onstep.errors import ConfigError
from onstep.sinks.metric_sink import MetricSink
from onstep.sinks.sink_names import make_sink
from onstep.sinks.tracker_run import is_installed

_PROJECT = {"wandb": "project", "mlflow": "experiment", "comet": "project", "trackio": "project"}
"""What the sink of a tracker calls the project."""


def reporting_sinks(config: ConfigContainer) -> list[MetricSink]:
    """A sink for each tracker of `logger.report_to`; [] where it names none. Nothing is opened.

    Raises:
        ConfigError: for an unknown tracker, and for one whose package is not installed, with the command that does.
    """
    names = tracker_list(config.logger.report_to, "logger.report_to")
    if names == [ALL]:
        names = [name for name in TRACKERS if is_installed(name)]
    return [make_sink(name, **_options(name, config)) for name in names]


def tracker_options(name: str, logger: LoggerConfig) -> dict[str, Any]:
    """What `logger` says about a tracker, as arguments of its sink; without what is unset, the sink's to choose."""
    options: dict[str, dict[str, Any]] = {
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
    """`tracker_options`, and before them what holds for every tracker: `trainer.project`, `trainer.run_name`."""
    if name not in _PROJECT:
        return {}
    trainer = config.trainer
    project = trainer.get("project", DEFAULT_PROJECT)
    common = {_PROJECT[name]: None if project == DEFAULT_PROJECT else project, "run_name": trainer.get("run_name")}
    if name == "trackio":
        common |= {"space_id": trainer.get("trackio_space_id"), "bucket_id": trainer.get("trackio_bucket_id")}
    return tracker_options(name, config.logger) | {key: value for key, value in common.items() if value}


def has_sinks(callbacks: Iterable[Any]) -> bool:
    """Whether one of the callbacks fills trackers: it has them as `sinks`."""
    return any(hasattr(callback, "sinks") for callback in callbacks)


def check_reported(config: ConfigContainer, callbacks: Iterable[Any]) -> None:
    """Refuse a `logger.report_to` that no callback acts on.

    Raises:
        ConfigError: with what to register.
    """
    names = tracker_list(config.logger.report_to, "logger.report_to")
    if names and not has_sinks(callbacks):
        raise ConfigError(
            f"logger.report_to={names!r} is read by `onstep train` and Trainer; for pretrain() give the trackers "
            f"yourself: pretrain(config, callbacks=[MetricSinks({names!r})]), from onstep.callbacks."
        )
