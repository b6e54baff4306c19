"""Defines the bounds on what clients may send, and delays what comes too often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

MOST_BODY_BYTES = 64 << 10
MOST_HEADER_BYTES = 16 << 10
MOST_TOKEN_BYTES = 4096

MOST_STREAMS = 16
MOST_POINTS = 200_000
"""In one answer; with many curves each has fewer."""
BACKLOG = 32
"""Connections that the kernel keeps waiting."""

REQUEST_SECONDS = 10.0
"""For the request line and headers, for a body, and between two requests."""
WRITE_SECONDS = 30.0
"""For a client to read some of an answer that fills its connection's buffers."""
FINISH_SECONDS = 0.5
"""For answers that are being given when the server stops."""
SWEEP_SECONDS = 0.5
"""Between two looks at all connections."""

ACCEPT_PAUSE_SECONDS = 0.1
STRANGERS_PER_SECOND, STRANGERS_AT_ONCE = 10.0, 100.0
"""Requests without a valid token."""
MOST_STRANGERS_WAITING = 16
"""Further requests without a valid token are refused at once, with their connection."""

FREE_READS, READ_PAUSE_SECONDS = 8, 0.05
"""A request that comes in more pieces than this is read with pauses."""

MOST_WAIT_SECONDS = 60.0
"""For the outcome of a command."""
HEARTBEAT_SECONDS = 15.0
"""Between two signs of life in an event stream."""
LOGIN_SECONDS, LOGINS_AT_ONCE = 0.2, 2
LINK_SECONDS, MOST_LINKS = 60.0, 16
MOST_SESSIONS = 64


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections a server has at a time, and how many new ones; by default one beside a training."""

    most: int = 64
    accepts_per_second: float = 60.0
    accepts_at_once: float = 128.0
    """Connections that are accepted; until they send the beginning of a request, each costs some 50 microseconds."""
    per_second: float = 10.0
    at_once: float = 64.0
    """HTTP on one costs some 500 microseconds of the interpreter, which the training thread needs as well."""
    closed_for_room: int = 1
    """Idle ones that are closed together when there are too many: finding them means to look at all."""


class Throttle:
    """Lets `rate` callers per second pass, and `burst` at once after a pause; the others wait for their turn.

    Args:
        clock: seconds.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1.0 / rate
        self._tolerance = (burst - 1) / rate
        self._clock = clock
        self._next = 0.0
        self.waiting = 0
        """How many wait."""

    def reserve(self) -> float:
        """Take the next turn; returns how many seconds are left until then."""
        now = self._clock()
        due = max(self._next, now)
        self._next = due + self._interval
        return max(0.0, due - self._tolerance - now)

    async def turn(self) -> None:
        """Wait for a turn."""
        seconds = self.reserve()
        if seconds <= 0:
            return
        self.waiting += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.waiting -= 1
