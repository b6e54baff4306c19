"""Defines the request and the result of a search, with the names of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from onstep.record.kinds import Metrics


class HPSearchBackend(StrEnum):
    """What chooses the trials of a search."""

    OPTUNA = "optuna"
    RAY = "ray"


class BestRun(NamedTuple):
    """The best trial of a search."""

    run_id: str
    """Its number."""
    objective: float | list[float]
    """Its objective, or one for each direction."""
    hyperparameters: dict[str, Any]
    """Its parameters by name."""
    run_summary: Any = None
    """With Ray, its `ExperimentAnalysis`; None with Optuna, whose study has the other trials."""


@dataclass(frozen=True)
class Wanted:
    """The search that the user asks for, with checked values."""

    n_trials: int
    """Trials of the whole search, those of earlier processes included."""
    directions: tuple[str, ...]
    """`minimize` or `maximize`, for each value of the objective."""
    options: dict[str, Any] = field(default_factory=dict)
    """The keywords for the backend."""


class Sweep(Protocol):
    """The search in progress, as the methods of a Trainer see it."""

    def parameters_of(self, trial: Any) -> Mapping[str, object]:
        """The arguments that a trial sets, by name."""
        ...

    def report(self, trial: Any, step: int, metrics: Metrics) -> str | None:
        """Take the metrics of an evaluation of the trial in progress, on rank 0; returns why it should stop, if so."""
        ...


HPSpace = Callable[[Any], Any]
"""Gives the parameters of a trial by name."""
