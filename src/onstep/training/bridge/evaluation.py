"""Megatron Bridge's `evaluate()` and `evaluate_and_print_results()`, which need no run around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from onstep.training import evaluation
from onstep.training.profiling_features import MemoryRelease
from onstep.training.run import Run

P = ParamSpec("P")
T = TypeVar("T")


def _alone(function: Callable[P, T]) -> Callable[P, T]:
    """The function with the features that an evaluation outside of a run has."""

    @wraps(function)
    def evaluated(*args: P.args, **kwargs: P.kwargs) -> T:
        run = args[0] if args else kwargs["state"]
        assert isinstance(run, Run)
        with run.features.open((MemoryRelease,), run, run.world):
            return function(*args, **kwargs)

    return evaluated


evaluate = _alone(evaluation.evaluate)
evaluate_and_print_results = _alone(evaluation.evaluate_and_print_results)
