"""How many of the newest points a kill might take from a tracker."""

from __future__ import annotations

import time
from collections.abc import Callable

from onstep.sinks.points import SETTLING_SECONDS

_MARK_SECONDS = 0.25


class Deliveries:
    """Counts what is handed over by one thread and taken by another.

    What was taken counts as unsettled for `SETTLING_SECONDS` more: trackers write what they are given a little later.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: tuple[tuple[float, int], ...] = ()
        """Moments at which everything up to a number was taken, the newest last; only the taker replaces them."""
        self._newest = (0.0, 0)
        self.num_given = 0
        """Points that were handed over so far."""

    def give(self, number: int = 1) -> int:
        """Count points that are handed over; returns the number of the last one."""
        self.num_given += number
        return self.num_given

    def take(self, number: int) -> None:
        """Everything up to `number` has been taken."""
        now = self._clock()
        self._newest = (now, number)
        if self._marks and now - self._marks[-1][0] < _MARK_SECONDS:
            return
        settled = [mark for mark in self._marks if now - mark[0] >= SETTLING_SECONDS]
        young = [mark for mark in self._marks if now - mark[0] < SETTLING_SECONDS]
        self._marks = (*settled[-1:], *young, self._newest)

    @property
    def num_unsettled(self) -> int:
        """Points, counted from the newest back to the oldest that a kill might take."""
        last_settled = self._clock() - SETTLING_SECONDS
        numbers = [number for at, number in (*self._marks, self._newest) if at <= last_settled]
        return self.num_given - max(numbers, default=0)
