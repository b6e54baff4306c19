"""The names of trackers, and of metrics in them: ours, Megatron Bridge's, and within what MLflow accepts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from onstep.config.reporting import NAMES
from onstep.errors import ConfigError
from onstep.trackers.tracker import MetricSink

MAX_METRIC_NAME = 250
MAX_PARAMETER_NAME = 250
MAX_PARAMETER_VALUE = 500
"""Characters; MLflow 3 takes 6000, its versions before 2.10 took 500."""
PARAMETERS_PER_BATCH = 100
METRICS_PER_BATCH = 1000

RENAMED = {"throughput/tflops/device": "throughput/tflops_per_device"}
"""Megatron Bridge's names that have another one in MLflow."""

_FORBIDDEN = re.compile(r"[^\w.\- :/]")
_TIMER = re.compile(r"[^ ]*-time")


def metric_name(name: str) -> str:
    """A metric's name as MLflow takes it: `throughput/device/tokens_per_sec` is `throughput/device_tokens_per_sec`.

    "@" becomes "_at_"; of several "/", the first is kept and later ones become "_", in names of timers (`...-time`) all
    of them; what is no letter, digit, `_ . - :` or space becomes "_".
    """
    if name in RENAMED:
        return RENAMED[name]
    name = re.sub("/+", "/", name.replace("@", "_at_")).strip("/")
    group, slash, rest = name.partition("/")
    if _TIMER.fullmatch(name):
        slash = slash.replace("/", "_")
    name = _FORBIDDEN.sub("_", _no_path(group) + slash + _no_path(rest.replace("/", "_")))
    return name[:MAX_METRIC_NAME] or "_"


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """The nested values of a configuration as MLflow's parameters: `optimizer.lr` and its value as text, cut to fit."""
    flat: dict[str, str] = {}
    for key, value in _leaves(config, ""):
        name = _FORBIDDEN.sub("_", key).replace("/", "_")[:MAX_PARAMETER_NAME]
        flat[name] = str(value)[:MAX_PARAMETER_VALUE]
    return flat


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _no_path(part: str) -> str:
    """Without the dots that a file system would read as this folder or the one above."""
    return part.replace(".", "_") if part == "." or part.startswith("..") else part


SINKS: dict[str, tuple[str, str]] = {
    "csv": ("onstep.trackers.services.csv_tracker", "CsvSink"),
    "tensorboard": ("onstep.trackers.services.tensorboard_tracker", "TensorBoardSink"),
    "wandb": ("onstep.trackers.services.wandb_tracker", "WandbSink"),
    "mlflow": ("onstep.trackers.services.mlflow_tracker", "MlflowSink"),
    "comet": ("onstep.trackers.services.comet_tracker", "CometSink"),
    "trackio": ("onstep.trackers.services.trackio_tracker", "TrackioSink"),
}
"""By name of the tracker: the module and the class of its sink, imported when it is asked for."""

_PREFIXES = {"eval_": "eval/", "test_": "test/"}
HF, BRIDGE = NAMES
"""The tables of names that trackers can show: Hugging Face's of the journal's metrics, and Megatron Bridge's tags."""

_ONLY = {"samples vs steps": ("wandb", "mlflow"), "decoupled-learning-rate": ("tensorboard",)}
"""Megatron Bridge's tags that not every one of its trackers gets."""
_BRIDGES = ("tensorboard", "wandb", "mlflow", "comet")
_EVALUATION = re.compile(r"(.+) (validation|test)( ppl)?")

_OWN = "sink/"
"""What the trackers report of themselves is no metric of the training."""


def make_sink(name: str, **options: Any) -> MetricSink:
    """The sink of a tracker; `options` are its constructor's.

    Raises:
        ConfigError: for a name that no tracker has, with the nearest one, and for options that its sink has not.
    """
    if name not in SINKS:
        near = difflib.get_close_matches(name, SINKS, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name!r} is no tracker; use one of {', '.join(sorted(SINKS))}.{meant}")
    module, class_name = SINKS[name]
    sink_class = getattr(import_module(module), class_name)
    try:
        sink: MetricSink = sink_class(**options)
    except TypeError as error:
        raise ConfigError(
            f"The tracker {name!r} cannot be made with the options {sorted(options)}: {error}."
        ) from error
    return sink


_METHODS = ("open", "log", "text", "state_dict", "close")


def check_sink(sink: Any) -> None:
    """Refuse an object that cannot be a tracker.

    Raises:
        ConfigError: for one without a name or without one of a sink's methods, and for a class.
    """
    if isinstance(sink, type):
        raise ConfigError(f"{sink.__name__} is a class; give an object of it: {sink.__name__}(...).")
    if not isinstance(getattr(sink, "name", None), str):
        raise ConfigError(f"{sink!r} is no tracker: it has no `name`; give it a class attribute name = '...'.")
    missing = [method for method in _METHODS if not callable(getattr(sink, method, None))]
    if missing:
        raise ConfigError(
            f"{sink!r} is no tracker: it has no method {', '.join(missing)}; a sink has {', '.join(_METHODS)}."
        )


def how_to_fill(name: str, folder: Path) -> str:
    """How the journal in a run's folder fills a tracker afterwards."""
    journal = str(folder / "trainer_logs.json")
    how = f"onstep logs replay {folder} --to {name}" if name in SINKS else f"onstep.trackers.replay({journal!r}, sink)"
    return f"The journal is complete; to fill the tracker afterwards: {how}"


def tracker_name(name: str) -> str:
    """A metric of the journal as trackers show it: `train/loss`, `eval/loss`, `test/loss`, as Hugging Face's do."""
    for prefix, shown in _PREFIXES.items():
        if name.startswith(prefix):
            return shown + name.removeprefix(prefix)
    return name if name.startswith(_OWN) else f"train/{name}"


def tracker_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` of the journal under the names that trackers show; `step` is every tracker's axis, and no metric."""
    return {tracker_name(name): value for name, value in metrics.items() if name != "step"}


def bridge_names(tracker: str, tags: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron Bridge's tags as a tracker shows them: without those that it does not get, and with MLflow's names."""
    known = tracker in _BRIDGES
    shown = {tag: value for tag, value in tags.items() if not known or tracker in _ONLY.get(tag, _BRIDGES)}
    return {_mlflow_name(tag): value for tag, value in shown.items()} if tracker == "mlflow" else shown


def _mlflow_name(tag: str) -> str:
    """`val/lm loss` of `lm loss validation`; of all else what MLflow accepts."""
    evaluation = _EVALUATION.fullmatch(tag)
    if evaluation is not None:
        name, kind, ppl = evaluation.groups(default="")
        tag = f"{'val' if kind == 'validation' else kind}/{name}{ppl}"
    return metric_name(tag)
