"""The clocks of a run, in one place where a test can set them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """What the training log reads the time from."""

    wall: Callable[[], float] = time.time
    """Unix seconds."""
    elapsed: Callable[[], float] = time.perf_counter
    """Seconds on a clock that never goes back; only differences mean anything."""
