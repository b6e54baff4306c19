"""Moves learning-rate schedules to the run's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol


class Schedule(Protocol):
    """A learning-rate schedule of torch, or of Onstep."""

    step: Callable[..., object]


def advance(scheduler: Schedule, steps: int, samples_of_a_step: int) -> None:
    """Move a scheduler forward by optimizer steps; Onstep's own count samples."""
    increment = (samples_of_a_step,) if hasattr(scheduler, "num_steps") else ()
    with warnings.catch_warnings():  # torch warns of schedulers that are stepped before the optimizer
        warnings.simplefilter("ignore")
        for _ in range(steps):
            scheduler.step(*increment)
