"""Measures how long callbacks take, only while a measurement is running."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Given = TypeVar("Given")


class CallbackTimer:
    """Seconds spent in each callback of a manager, from `start` to `stop`.

    Times are exclusive: if a callback triggers other callbacks (through an evaluation, say), their time is not counted
    as its own. While stopped, the clock costs nothing.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.seconds: dict[str, float] = {}
        """Seconds by the callback's name in messages; of the latest measurement."""
        self.read: Callable[[], float] = time.perf_counter
        self._starts = 0
        self._inside: list[str] = []
        self._last = 0.0

    def start(self, read: Callable[[], float] = time.perf_counter) -> None:
        """Start measuring with the next callback. If already running, the current `read` function is kept."""
        self._starts += 1
        if self.is_running:
            return
        self.is_running, self.read = True, read
        self.seconds, self._inside = {}, []

    def stop(self) -> None:
        """Stop measuring once every `start` has been matched by a `stop`."""
        self._starts = max(0, self._starts - 1)
        if self._starts == 0 and self.is_running:
            self._charge()
            self.is_running, self._inside = False, []

    def reading(self) -> tuple[float, float]:
        """The current time and the seconds of all callbacks so far, including those still running."""
        self._charge()
        return self._last, sum(self.seconds.values())

    def call(self, author: str, handle: Callable[[Given], object], given: Given) -> None:
        """Call a callback, and charge the time until it returns to its author.

        Args:
            author: the name of the callback, which the time is charged to.
            handle: the function to call.
            given: its argument.
        """
        self._charge()
        self._inside.append(author)
        try:
            handle(given)
        finally:
            if self._inside:
                self._charge()
                self._inside.pop()

    def _charge(self) -> None:
        now = self.read()
        if self._inside:
            author = self._inside[-1]
            self.seconds[author] = self.seconds.get(author, 0.0) + now - self._last
        self._last = now
