"""The names of the trackers and of their metrics."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
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


def tracker_name(name: str) -> str:
    """A metric of the journal as trackers show it: `train/loss`, `eval/loss`, `test/loss`, as Hugging Face's do."""
    for prefix, shown in _PREFIXES.items():
        if name.startswith(prefix):
            return shown + name.removeprefix(prefix)
    return name if name.startswith(_OWN) else f"train/{name}"


def tracker_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` of the journal under the names that trackers show; `step` is every tracker's axis, and no metric."""
    return {tracker_name(name): value for name, value in metrics.items() if name != "step"}
