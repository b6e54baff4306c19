"""Converts metric names to those that each tracker shows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from onstep.config.trackers import BRIDGE_FIELDS, NAMES

MAX_METRIC_NAME = 250
MAX_PARAMETER_NAME = 250
MAX_PARAMETER_VALUE = 500
"""Limit in characters; MLflow 3 accepts 6000, versions before 2.10 accepted 500."""
PARAMETERS_PER_BATCH = 100
METRICS_PER_BATCH = 1000

RENAMED = {"throughput/tflops/device": "throughput/tflops_per_device"}
"""Megatron Bridge's names that differ in MLflow."""

_FORBIDDEN = re.compile(r"[^\w.\- :/]")
_TIMER = re.compile(r"[^ ]*-time")


def metric_name(name: str) -> str:
    """Convert a metric's name for MLflow: `throughput/device/tokens_per_sec` is `throughput/device_tokens_per_sec`.

    "@" becomes "_at_". The first "/" is kept and later ones become "_"; in names of timers (`...-time`) all of them do.
    Characters other than letters, digits, `_ . - :` and space become "_".
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
    """Flatten a configuration to MLflow's parameters: `optimizer.lr` and its value as text, truncated to fit."""
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
    """Replace the dots of `.` and `..`, which a file system would interpret."""
    return part.replace(".", "_") if part == "." or part.startswith("..") else part


_PREFIXES = {"eval_": "eval/", "test_": "test/"}
HF, BRIDGE = NAMES
"""The naming schemes: Hugging Face's names of the metrics log's metrics, and Megatron Bridge's tags."""

_ONLY = {"samples vs steps": ("wandb", "mlflow"), "decoupled-learning-rate": ("tensorboard",)}
"""Megatron Bridge's tags that only some of its trackers get."""
_EVALUATION = re.compile(r"(.+) (validation|test)( ppl)?")


@lru_cache(maxsize=1024)
def tracker_name(name: str) -> str:
    """Convert a metrics log's metric name to the name in trackers, as Hugging Face does: `train/loss`, `eval/loss`.

    Args:
        name: the name of the metric in the metrics log.
    """
    for prefix, shown in _PREFIXES.items():
        if name.startswith(prefix):
            return shown + name.removeprefix(prefix)
    return f"train/{name}"


def tracker_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename a metrics log's `metrics` for trackers, dropping `step`, which is their axis."""
    return {tracker_name(name): value for name, value in metrics.items() if name != "step"}


def bridge_names(tracker: str, tags: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron Bridge's tags for a tracker: without those that it does not get, renamed for MLflow."""
    known = tracker in BRIDGE_FIELDS
    shown = {tag: value for tag, value in tags.items() if not known or tracker in _ONLY.get(tag, BRIDGE_FIELDS)}
    return {_mlflow_name(tag): value for tag, value in shown.items()} if tracker == "mlflow" else shown


def _mlflow_name(tag: str) -> str:
    """Convert `lm loss validation` to `val/lm loss`, and other tags to names that MLflow accepts."""
    evaluation = _EVALUATION.fullmatch(tag)
    if evaluation is not None:
        name, kind, ppl = evaluation.groups(default="")
        tag = f"{'val' if kind == 'validation' else kind}/{name}{ppl}"
    return metric_name(tag)
