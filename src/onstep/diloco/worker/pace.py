"""Measures the optimizer steps per second of a worker, without the time that it waits for others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Pace:
    """The times of the last steps, on a clock that stops while the worker waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=100)
        self._waited = 0.0
        self._last_step = clock()

    def count_step(self) -> None:
        """A step is over."""
        self._last_step = self._clock()
        self._times.append(self._clock() - self._waited)

    def leave_out(self, seconds: float) -> None:
        """Seconds since the last step that were spent waiting."""
        self._waited += seconds

    def seconds_since_step(self) -> float:
        """Since the last step, or since the start."""
        return self._clock() - self._last_step

    def steps_per_second(self) -> float:
        """Over the last steps; 0 until there are two."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return 0.0
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])
