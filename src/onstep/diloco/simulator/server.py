"""Simulates the server: the protocol's coordinator with outer steps, held requests and failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import Await, NotYet, Reply, Request, Settings, Submit
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.simulator.environment.clock import Clock

RUN_ID = "simulated"
FINGERPRINT = "simulated"


class Caller(Protocol):
    """The connection of a request."""

    def answer(self, reply: Reply) -> None:
        """Send the reply."""
        ...

    def fail(self, reason: str) -> None:
        """Break."""
        ...


@dataclass(frozen=True, slots=True)
class _Held:
    """An Await that is held until its version exists."""

    request: Await
    caller: Caller
    until: float


class SimulatedServer:
    """Drives a coordinator as the real server does.

    Heartbeats are not simulated one by one: a worker that is alive and connected is never evicted, and any other
    exactly `heartbeat_timeout` after its last request.
    """

    def __init__(
        self,
        clock: Clock,
        settings: Settings,
        round_seconds: float,
        on_commit: Callable[[Closed], None],
        *,
        can_fail: bool = False,
    ) -> None:
        self._clock, self._settings = clock, replace(settings, heartbeat_timeout=0.0)
        self._round_seconds, self._on_commit, self._can_fail = round_seconds, on_commit, can_fail
        self.is_up = True
        self.coordinator = Coordinator(self._settings, run_id=RUN_ID, fingerprint=FINGERPRINT)
        self._saved: dict[str, object] = self.coordinator.state_dict()
        self._saved_revision = 0
        self._epoch = 0
        """Incremented by each failure, which cancels everything planned before it."""
        self._held: list[dict[str, _Held]] = [{} for _ in range(settings.num_fragments)]
        self._busy_until = 0.0
        self._wakes_at = self._expires_at = math.inf

    def receive(self, request: Request, caller: Caller) -> None:
        """Handle a request that has arrived with its body."""
        if not self.is_up:
            caller.fail("the server is down")
            return
        reply = self.coordinator.handle(request, self._clock.now)
        if type(request) is Await and type(reply) is NotYet and reply.is_pending and request.wait > 0.0:
            self._hold(request, caller)
            return
        caller.answer(reply)
        if type(request) is not Await:
            self._follow_up()

    def evict(self, worker_id: str) -> None:
        """Evict a worker after its heartbeat timeout."""
        if self.is_up and self.coordinator.evict(worker_id, self._clock.now):
            self._follow_up()

    def fail(self) -> None:
        """Die: uncommitted submissions are lost, and every connection breaks."""
        self.is_up = False
        self._epoch += 1
        self._wakes_at, self._expires_at, self._busy_until = math.inf, math.inf, 0.0
        for by_worker in self._held:
            for held in by_worker.values():
                held.caller.fail("the server died")
            by_worker.clear()

    def restart(self) -> None:
        """Restart from the last commit."""
        self.is_up = True
        now = self._clock.now
        self.coordinator = Coordinator(
            self._settings, run_id=RUN_ID, fingerprint=FINGERPRINT, state=self._saved, now=now
        )
        self._saved_revision = self.coordinator.revision
        self._follow_up()

    def _follow_up(self) -> None:
        """Start the outer steps of closed rounds, and schedule the next tick."""
        for closed in self.coordinator.take_closed():
            self._busy_until = max(self._clock.now, self._busy_until) + self._round_seconds
            self._clock.at(self._busy_until, self._commit, closed, self._epoch)
        if self._can_fail and self.coordinator.revision != self._saved_revision:
            self._saved, self._saved_revision = self.coordinator.state_dict(), self.coordinator.revision
        wake = self.coordinator.next_wake()
        if wake is not None and wake < self._wakes_at:
            self._wakes_at = wake
            self._clock.at(wake, self._tick, wake, self._epoch)

    def _tick(self, planned: float, epoch: int) -> None:
        if planned != self._wakes_at or epoch != self._epoch:
            return
        self._wakes_at = math.inf
        self.coordinator.tick(self._clock.now)
        self._follow_up()

    def _commit(self, closed: Closed, epoch: int) -> None:
        if epoch != self._epoch:
            return
        digest = f"{closed.fragment}/{closed.version}"
        if self._can_fail:
            self._saved = self.coordinator.state_after(closed, digest)
        self.coordinator.committed(closed, digest, self._clock.now)
        self._on_commit(closed)
        self._answer(closed.fragment, [one.submit for one in closed.contributions])
        self._follow_up()

    def _hold(self, request: Await, caller: Caller) -> None:
        """Hold a request until a commit answers it or its wait is over."""
        until = self._clock.now + request.wait
        self._held[request.fragment][request.worker_id] = _Held(request, caller, until)
        self._plan_expiry(until)

    def _answer(self, fragment: int, submits: Sequence[Submit]) -> None:
        """Answer the held requests of contributors; the others wait for another round."""
        by_worker = self._held[fragment]
        for submit in submits:
            held = by_worker.get(submit.worker_id)
            if held is not None:
                reply = self.coordinator.handle(held.request, self._clock.now)
                if type(reply) is not NotYet:
                    del by_worker[submit.worker_id]
                    held.caller.answer(reply)

    def _plan_expiry(self, until: float) -> None:
        if until < self._expires_at:
            self._expires_at = until
            self._clock.at(until, self._expire, until)

    def _expire(self, planned: float) -> None:
        if planned != self._expires_at:
            return
        self._expires_at = math.inf
        for by_worker in self._held:
            for worker_id, held in list(by_worker.items()):
                if held.until <= planned:
                    del by_worker[worker_id]
                    held.caller.answer(self.coordinator.handle(held.request, planned))
                else:
                    self._plan_expiry(held.until)
