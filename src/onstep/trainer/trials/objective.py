"""The number that a search minimizes or maximizes."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

from onstep.errors import ConfigError
from onstep.record.kinds import Metrics

Objective = float | list[float]

_OF_THE_MACHINE = ("_runtime", "_per_second", "_preparation_time", "_alloc_delta", "_peaked_delta")
"""Ends of the names of metrics that say how fast an evaluation was, and how much memory it used."""


def default_compute_objective(metrics: Metrics) -> float:
    """The sum of the metrics other than the loss; the loss of the evaluation if there are none.

    Raises:
        ConfigError: if there is no loss either.
    """
    own = {name: value for name, value in metrics.items() if name not in ("eval_loss", "epoch")}
    own = {name: value for name, value in own.items() if not name.endswith(_OF_THE_MACHINE)}
    if own:
        return float(sum(own.values()))
    if "eval_loss" not in metrics:
        raise ConfigError("The evaluation has no eval_loss and no metrics to search by; pass compute_objective.")
    return float(metrics["eval_loss"])


def objective_of(compute: Callable[[Metrics], Any], metrics: Metrics, count: int) -> Objective:
    """The objective of an evaluation: a number, or a list if there are several directions.

    Args:
        compute: the user's function of the metrics, which gets a copy.
        count: the number of directions.

    Raises:
        ConfigError: if it returns something else.
    """
    found = compute(dict(metrics))
    several = isinstance(found, Sequence) and not isinstance(found, str)
    values = list(found) if several else [found]
    if len(values) != count or not all(isinstance(value, numbers.Real) for value in values):
        wanted = "a number" if count == 1 else f"{count} numbers, one for each direction"
        raise ConfigError(f"compute_objective must return {wanted}, got {found!r}")
    return [float(value) for value in values] if count > 1 else float(values[0])
