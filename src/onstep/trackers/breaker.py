"""Decides when a failing tracker is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable


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
