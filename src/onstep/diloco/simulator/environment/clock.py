"""Simulates time: a clock that calls actions in the order of their times."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Calls actions at their time, those of the same time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the start."""
        self._waiting: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._is_running = False

    @property
    def events(self) -> int:
        """Actions called so far."""
        return self._number - len(self._waiting)

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` at `time`; if that is in the past, after all actions that are already due."""
        self._number += 1
        heappush(self._waiting, (time if time > self.now else self.now, self._number, action, arguments))

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` in `seconds`."""
        self._number += 1
        heappush(self._waiting, (self.now + seconds, self._number, action, arguments))

    def run(self, until: float = math.inf) -> None:
        """Call actions until the time `until`, until none is left, or until `stop`."""
        waiting = self._waiting
        self._is_running = True
        while waiting and self._is_running:
            if waiting[0][0] > until:
                self.now = until
                return
            self.now, _, action, arguments = heappop(waiting)
            action(*arguments)

    def stop(self) -> None:
        """End `run` after the action that is being called."""
        self._is_running = False
