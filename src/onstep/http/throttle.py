"""Delays what comes too often."""

from __future__ import annotations

import asyncio
import time


class Throttle:
    """Lets `rate` callers per second pass, and `burst` at once after a pause; the others wait for their turn."""

    def __init__(self, rate: float, burst: float) -> None:
        self._interval = 1.0 / rate
        self._tolerance = (burst - 1) / rate
        self._next = 0.0
        self.waiting = 0
        """How many wait."""

    def reserve(self) -> float:
        """Take the next turn; returns how many seconds are left until then."""
        now = time.monotonic()
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
