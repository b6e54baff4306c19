"""How long callbacks take, measured only while somebody wants to know."""

from __future__ import annotations

import time
from collections.abc import Callable


class CallbackClock:
    """The seconds that each callback of a manager took, from `start` to `stop`.

    Time is exclusive: where a callback makes somebody tell other callbacks (by an evaluation, say), theirs is not its
    own. While it does not run, the manager asks it nothing.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.seconds: dict[str, float] = {}
        """By the callback's name, as messages have it; of the latest measurement."""
        self.read: Callable[[], float] = time.perf_counter
        self._starts = 0
        self._inside: list[str] = []
        self._last = 0.0

    def start(self, read: Callable[[], float] = time.perf_counter) -> None:
        """Measure, from the next callback that is told on. Where it runs already, it goes on with the clock it has."""
        self._starts += 1
        if self.is_running:
            return
        self.is_running, self.read = True, read
        self.seconds, self._inside = {}, []

    def stop(self) -> None:
        """End the measurement, once everybody who started it has stopped it."""
        self._starts = max(0, self._starts - 1)
        if self._starts == 0 and self.is_running:
            self._charge()
            self.is_running, self._inside = False, []

    def reading(self) -> tuple[float, float]:
        """Now, and the seconds of all callbacks until now, also of those that are being told."""
        self._charge()
        return self._last, sum(self.seconds.values())

    def enter(self, author: str) -> None:
        """A callback is about to be told. Called by the manager."""
        self._charge()
        self._inside.append(author)

    def leave(self) -> None:
        """It was told. Called by the manager for every `enter`."""
        if self._inside:
            self._charge()
            self._inside.pop()

    def _charge(self) -> None:
        now = self.read()
        if self._inside:
            author = self._inside[-1]
            self.seconds[author] = self.seconds.get(author, 0.0) + now - self._last
        self._last = now
