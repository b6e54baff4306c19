"""Metrics and parameters within what MLflow accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

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
