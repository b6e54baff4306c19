"""What waits for a sink between one `open` and its `close`, and the thread that takes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

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


@dataclass(frozen=True)
class Task:
    """One call of the sink that waits for its turn."""

    call: Callable[[], None]
    is_point: bool = True
    """Whether it may be dropped, and counts as such."""
    number: int = 0
    """How many points were handed over up to here."""


class Session:
    """The thread between one `open` and its `close`, and what waits for it."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.deliveries = Deliveries()
        self.num_again = 0
        """Points of an earlier process that are given to the sink again."""
        self.thread: threading.Thread | None = None
        """None where the system gave none."""
        self.is_closing = False
        self.is_abandoned = False
        """`close` has waited long enough: points that still wait are not delivered any more."""

    @property
    def is_alive(self) -> bool:
        """Whether anybody takes what is handed over."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def num_left(self) -> int:
        """Points that wait behind `begin_close`'s two last tasks."""
        return max(self.tasks.qsize() - 2, 0)


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
