"""When a tracker that fails is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Says whether something that keeps failing may be tried: not for a while after several failures in a row.

    Args:
        most_failures: Failures in a row after which it is left alone.
        retry_seconds: How long; then one attempt decides about the next while.
        clock: Seconds that only grow.
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
        """Whether the last attempts failed, so that it is left alone but for single attempts."""
        return self._failures >= self._most_failures

    def allows(self) -> bool:
        """Whether it may be tried now."""
        return not self.is_open or self._clock() - self._failed_at >= self._retry_seconds

    def succeeded(self) -> None:
        """An attempt went well: all is forgotten."""
        self._failures = 0

    def failed(self) -> None:
        """An attempt failed."""
        self._failures += 1
        self._failed_at = self._clock()
