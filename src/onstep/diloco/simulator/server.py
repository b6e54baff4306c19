"""The simulated server: the protocol's coordinator with its rounds, outer steps, parked questions and failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Protocol

from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import Await, NotYet, Reply, Request, Settings, Submit
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.simulator.environment.clock import Clock

RUN_ID = "simulated"
FINGERPRINT = "simulated"


class Caller(Protocol):
    """The connection that a request came through."""

    def answer(self, reply: Reply) -> None:
        """Send the reply."""
        ...

    def fail(self, reason: str) -> None:
        """Break."""
        ...


@dataclass(slots=True, eq=False)
class _Question:
    """An Await that has not been answered."""

    request: Await
    caller: Caller | None
    """None once it is answered."""


class SimulatedServer:
    """Drives a coordinator as the real server does.

    Heartbeats are not simulated one by one: a worker that is alive and connected is never evicted, and any other
    exactly `heartbeat_timeout` after its last sign of life.
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
        """Incremented by each failure: what was planned before it does not happen."""
        self._questions: list[dict[str, _Question]] = [{} for _ in range(settings.num_fragments)]
        self._expiries: list[tuple[float, int, _Question]] = []
        self._number = 0
        self._busy_until = 0.0
        self._wakes_at = math.inf

    def receive(self, request: Request, caller: Caller) -> None:
        """Handle a request that has arrived with its body."""
        if not self.is_up:
            caller.fail("the server is down")
            return
        reply = self.coordinator.handle(request, self._clock.now)
        if type(request) is Await and type(reply) is NotYet and reply.is_pending and request.wait > 0.0:
            self._park(request, caller)
            return
        caller.answer(reply)
        if type(request) is not Await:
            self._follow_up()

    def evict(self, worker_id: str) -> None:
        """Evict a worker that has been silent for too long."""
        if self.is_up and self.coordinator.evict(worker_id, self._clock.now):
            self._follow_up()

    def fail(self) -> None:
        """Die: all that is not committed is lost, and every connection breaks."""
        self.is_up = False
        self._epoch += 1
        self._wakes_at, self._busy_until = math.inf, 0.0
        for questions in self._questions:
            for question in questions.values():
                if question.caller is not None:
                    question.caller.fail("the server died")
            questions.clear()
        self._expiries.clear()

    def restart(self) -> None:
        """Come back with what was committed."""
        self.is_up = True
        now = self._clock.now
        self.coordinator = Coordinator(
            self._settings, run_id=RUN_ID, fingerprint=FINGERPRINT, state=self._saved, now=now
        )
        self._saved_revision = self.coordinator.revision
        self._follow_up()

    def _follow_up(self) -> None:
        """Start the outer steps of rounds that were closed, and plan when to look again."""
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

    def _park(self, request: Await, caller: Caller) -> None:
        """Keep a question until a commit answers it or its time is over."""
        question = _Question(request, caller)
        self._questions[request.fragment][request.worker_id] = question
        self._number += 1
        expires = self._clock.now + request.wait
        if not self._expiries or expires < self._expiries[0][0]:
            self._clock.at(expires, self._expire, self._epoch)
        heappush(self._expiries, (expires, self._number, question))

    def _answer(self, fragment: int, submits: Sequence[Submit]) -> None:
        """Answer the questions of contributors; all others wait for a round of their own."""
        questions, handle, now = self._questions[fragment], self.coordinator.handle, self._clock.now
        for submit in submits:
            question = questions.get(submit.worker_id)
            if question is not None and question.caller is not None:
                reply = handle(question.request, now)
                if type(reply) is not NotYet:
                    question.caller.answer(reply)
                    question.caller = None
                    del questions[submit.worker_id]

    def _expire(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        expiries, now = self._expiries, self._clock.now
        while expiries and (expiries[0][2].caller is None or expiries[0][0] <= now):
            question = heappop(expiries)[2]
            if question.caller is not None:
                caller, question.caller = question.caller, None
                caller.answer(self.coordinator.handle(question.request, now))
        if expiries:
            self._clock.at(expiries[0][0], self._expire, epoch)
