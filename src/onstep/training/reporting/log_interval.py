"""Keeps where the current logging interval began."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class LogInterval:
    """The steps since the last logged one, and the training that they belong to."""

    start: float = field(default_factory=time.perf_counter)
    """Monotonic time in seconds when it began, later by what does not count."""
    num_samples: int = 0
    start_step: int = 0
    """The step that this process continued from."""
    training_start_time: float | None = None
    """Unix time when this process began to train; None if `train()` has not been called."""
