"""Kills workers and the server, cuts sites off, and brings them back."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from onstep.diloco.simulator.environment.clock import Clock


class Churn:
    """Two states in turn, up and down, of exponentially distributed durations."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        hours_up: float | None,
        minutes_down: float,
        go_down: Callable[[], None],
        come_up: Callable[[], None],
    ) -> None:
        self._clock, self._random = clock, random
        self._minutes_down, self._go_down, self._come_up = minutes_down, go_down, come_up
        self._hours_up = hours_up
        self._plan()

    def _plan(self) -> None:
        if self._hours_up is not None:
            self._clock.after(self._random.expovariate(1.0) * self._hours_up * 3600.0, self._down)

    def _down(self) -> None:
        self._go_down()
        self._clock.after(self._random.expovariate(1.0) * self._minutes_down * 60.0, self._up)

    def _up(self) -> None:
        self._come_up()
        self._plan()


class Attendance:
    """Which workers are alive and connected, and since when the others are silent."""

    def __init__(self, clock: Clock, quorum: int, heartbeat_timeout: float, evict: Callable[[str], None]) -> None:
        self._clock, self._quorum, self._timeout, self._evict = clock, quorum, heartbeat_timeout, evict
        self._silent_since: dict[str, float] = {}
        self._num_present = 0
        self.lacked_quorum = False
        """Whether there were fewer than the quorum since `begin_round`."""

    def begin_round(self) -> None:
        """Start to look for a missing quorum."""
        self.lacked_quorum = self._num_present < self._quorum

    def come(self, worker_id: str) -> None:
        """A worker starts or reconnects."""
        self._num_present += 1
        self._silent_since.pop(worker_id, None)

    def go(self, worker_id: str) -> None:
        """A worker dies or loses its connection; it is evicted after its heartbeat timeout."""
        self._num_present -= 1
        self._silent_since[worker_id] = self._clock.now
        self.lacked_quorum = self.lacked_quorum or self._num_present < self._quorum
        self._plan(worker_id)

    def server_is_back(self) -> None:
        """Restart the heartbeat timeouts of all silent workers, as a restarted server does."""
        for worker_id in self._silent_since:
            self._silent_since[worker_id] = self._clock.now
            self._plan(worker_id)

    def _plan(self, worker_id: str) -> None:
        if self._timeout > 0.0:
            self._clock.after(self._timeout, self._evict_if_silent, worker_id, self._clock.now)

    def _evict_if_silent(self, worker_id: str, since: float) -> None:
        if self._silent_since.get(worker_id) == since:
            self._evict(worker_id)
