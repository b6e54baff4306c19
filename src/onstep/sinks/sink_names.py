"""The names of the trackers and of their metrics."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError
from onstep.sinks.metric_sink import MetricSink

SINKS: dict[str, tuple[str, str]] = {
    "csv": ("onstep.sinks.csv_sink", "CsvSink"),
    "tensorboard": ("onstep.sinks.tensorboard_sink", "TensorBoardSink"),
    "wandb": ("onstep.sinks.wandb_sink", "WandbSink"),
    "mlflow": ("onstep.sinks.mlflow_sink", "MlflowSink"),
    "comet": ("onstep.sinks.comet_sink", "CometSink"),
    "trackio": ("onstep.sinks.trackio_sink", "TrackioSink"),
}
"""By name of the tracker: the module and the class of its sink, imported when it is asked for."""

_PREFIXES = {"eval_": "eval/", "test_": "test/"}
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
    how = f"onstep logs replay {folder} --to {name}" if name in SINKS else f"onstep.sinks.replay({journal!r}, sink)"
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
