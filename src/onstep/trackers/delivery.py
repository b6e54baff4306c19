"""Counts the points that a tracker has received, and decides when a failing tracker is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable

from onstep.trackers.points import SETTLING_SECONDS

_MARK_SECONDS = 0.25


class Deliveries:
    """Counts points passed from one thread to another.

    A delivered point counts as unsettled for `SETTLING_SECONDS` more, since trackers write with a short delay.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: tuple[tuple[float, int], ...] = ()
        """Times at which everything up to a number had been delivered, newest last; only the consumer replaces them."""
        self._newest = (0.0, 0)
        self.num_given = 0
        """Number of points enqueued so far."""

    def give(self, number: int = 1) -> int:
        """Count enqueued points; returns the number of the last one."""
        self.num_given += number
        return self.num_given

    def take(self, number: int) -> None:
        """Note that everything up to `number` has been delivered."""
        now = self._clock()
        self._newest = (now, number)
        if self._marks and now - self._marks[-1][0] < _MARK_SECONDS:
            return
        settled = [mark for mark in self._marks if now - mark[0] >= SETTLING_SECONDS]
        young = [mark for mark in self._marks if now - mark[0] < SETTLING_SECONDS]
        self._marks = (*settled[-1:], *young, self._newest)

    @property
    def num_unsettled(self) -> int:
        """Number of newest points that might be lost in a kill."""
        last_settled = self._clock() - SETTLING_SECONDS
        numbers = [number for at, number in (*self._marks, self._newest) if at <= last_settled]
        return self.num_given - max(numbers, default=0)


class CircuitBreaker:
    """Decides whether a failing operation may be tried: after several failures in a row, only once per interval.

    Args:
        most_failures: Failures in a row that open the breaker.
        retry_seconds: Seconds between single attempts while it is open.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self, most_failures: int = 5, retry_seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_failures = most_failures
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._failures = 0
        self._failed_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last attempts failed, so that only single attempts are allowed."""
        return self._failures >= self._most_failures

    def allows(self) -> bool:
        """Whether an attempt is allowed now."""
        return not self.is_open or self._clock() - self._failed_at >= self._retry_seconds

    def succeeded(self) -> None:
        """Note a successful attempt, which closes the breaker."""
        self._failures = 0

    def failed(self) -> None:
        """Note a failed attempt."""
        self._failures += 1
        self._failed_at = self._clock()
