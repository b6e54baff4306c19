"""A simulated worker: trains, submits what the protocol's session submits, may be killed and come back."""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from random import Random
from typing import Any

from onstep.diloco.fragments import due
from onstep.diloco.protocol.messages import Beat, Ready, Settings
from onstep.diloco.protocol.session import (
    Answer,
    Counted,
    Lost,
    NotCounted,
    Operation,
    Settlement,
    Sleep,
    Unsettled,
    WorkerSession,
)
from onstep.diloco.simulator.connection import Connection
from onstep.diloco.simulator.environment.clock import Clock
from onstep.diloco.simulator.environment.tasks import Task
from onstep.diloco.simulator.measures import SiteCounts
from onstep.diloco.simulator.scenario import Site
from onstep.diloco.simulator.server import FINGERPRINT

Life = Generator[Any, Any, None]
SYNC_BOUND = 600.0
"""Seconds that a worker waits for a round before it trains on."""
LOST_SECONDS = 14.0
"""Seconds without any answer after which it trains on: 2 + 4 + 8, for `max_sync_retries=3`."""
_LEAST_SHARE = 0.05
"""Of the mean duration, below which jitter does not bring a step."""


class SimulatedWorker:
    """One worker of a site, in all its sessions."""

    def __init__(
        self,
        worker_id: str,
        site: Site,
        settings: Settings,
        clock: Clock,
        connection: Connection,
        counts: SiteCounts,
        random: Random,
        *,
        can_lose: bool,
    ) -> None:
        """`can_lose` says whether requests can remain without an answer in this scenario."""
        self.worker_id, self.connection = worker_id, connection
        self.is_alive = False
        self._site, self._settings, self._clock, self._counts, self._random = site, settings, clock, counts, random
        self._step_seconds = site.step_seconds * max(_LEAST_SHARE, random.gauss(1.0, site.worker_spread))
        self._can_lose = can_lose
        self._tasks: list[Task] = []
        self._num_sessions = 0
        self._sync_every = settings.sync_every
        self._have: list[int] = []
        self._unsubmitted: list[int] = []
        """Steps that are in no submission, by fragment."""
        self._submitted: list[int] = []
        """Steps in the last submission."""
        self._training_since: float | None = None
        self._training_seconds = 0.0
        self._training_steps = 0

    def start(self) -> None:
        """Start a new session, without local progress."""
        self.is_alive = True
        self._num_sessions += 1
        self._session = WorkerSession(
            self.worker_id,
            f"{self.worker_id}.{self._num_sessions}",
            FINGERPRINT,
            clock=lambda: self._clock.now,
            poll_seconds=SYNC_BOUND,  # nothing cuts a virtual connection while its question waits
        )
        fragments = self._settings.num_fragments
        self._have, self._unsubmitted, self._submitted = [0] * fragments, [0] * fragments, [0] * fragments
        self._sync_every = self._settings.sync_every
        self._run(self._live())

    def kill(self) -> None:
        """Die: what was not submitted is lost."""
        self.stop_training()
        self.is_alive = False
        self._counts.killed_steps += sum(self._unsubmitted) + self._undelivered_steps()
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _undelivered_steps(self) -> int:
        """Steps in submissions that no server has."""
        pending = [self._session.pending(fragment) for fragment in range(len(self._unsubmitted))]
        delivered = self.connection.delivered
        return sum(one.steps for one in pending if one and delivered.get(one.fragment, -1) < one.sequence)

    def stop_training(self) -> None:
        """Count the steps that were taken since training began, all of them or some."""
        if self._training_since is None:
            return
        spent = self._clock.now - self._training_since
        share = min(1.0, spent / self._training_seconds)
        steps = self._training_steps if share > 1.0 - 1e-9 else int(share * self._training_steps)
        self._training_since = None
        self._counts.training_seconds += spent
        self._counts.steps += steps
        for fragment in range(len(self._unsubmitted)):
            self._unsubmitted[fragment] += steps

    def _run(self, life: Generator[Any, Any, Any]) -> Task:
        self._tasks = [task for task in self._tasks if not task.is_over]
        task = Task(self._clock, self.connection, life)
        self._tasks.append(task)
        task.resume(None)
        return task

    def _live(self) -> Life:
        """Join, fetch the parameters, then train and submit without end."""
        yield from self._join()
        streams = self._settings.num_fragments > 1
        in_flight: Task | None = None
        while True:
            for steps, fragments in schedule(self._sync_every, self._settings.num_fragments):
                yield self._start_training(steps)
                self.stop_training()
                if in_flight is not None and not in_flight.is_over:
                    yield in_flight
                if self._site.sync_seconds > 0.0:
                    yield Sleep(self._site.sync_seconds)
                in_flight = self._run(self._exchange(fragments)) if streams else None
                if not streams:
                    yield from self._exchange(fragments)
            if self._settings.dylu:
                yield from self._report_speed()

    def _join(self) -> Life:
        while not hasattr((yield from self._session.join(SYNC_BOUND)), "run_id"):
            pass
        for fragment in range(self._settings.num_fragments):
            yield from self._fetch(fragment)

    def _fetch(self, fragment: int) -> Life:
        """Get the newest parameters, however long it lasts."""
        while True:
            answer = yield from self._session.fetch(fragment, SYNC_BOUND)
            if type(answer) is Answer:
                assert isinstance(answer.reply, Ready)
                self._have[fragment] = answer.reply.version
                return

    def _exchange(self, fragments: tuple[int, ...]) -> Life:
        """Settle what is pending, then submit what was trained since."""
        for fragment in fragments:
            is_settled = self._session.pending(fragment) is None or (yield from self._settle(fragment))
            if is_settled:
                self._begin(fragment)
                yield from self._settle(fragment)

    def _begin(self, fragment: int) -> None:
        steps = self._submitted[fragment] = self._unsubmitted[fragment]
        self._unsubmitted[fragment] = 0
        self._session.begin(
            fragment,
            base_version=self._have[fragment],
            tokens=steps * self._site.tokens_per_step,
            steps=steps,
            codec=self._settings.codec,
            body=self.connection.payload.encoded[fragment],
        )

    def _settle(self, fragment: int) -> Generator[Any, Any, bool]:
        """Find out what became of a submission; whether it did."""
        operation = self._session.settle(fragment, SYNC_BOUND, self._have[fragment])
        settlement = yield from self._impatient(operation) if self._can_lose else operation
        if type(settlement) is Counted:
            self._have[fragment] = settlement.ready.version
        elif type(settlement) is NotCounted:  # what was dropped stays in the local parameters
            self._unsubmitted[fragment] += self._submitted[fragment]
            yield from self._fetch(fragment)
        return type(settlement) is not Unsettled

    def _impatient(self, operation: Operation[Settlement]) -> Generator[Any, Any, Settlement]:
        """Give up an operation without any answer for `LOST_SECONDS`, as the real worker does, which then trains on."""
        outcome, answered_at = None, self._clock.now
        while True:
            try:
                effect = operation.send(outcome)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            outcome = yield effect
            if type(outcome) is Answer:
                answered_at = self._clock.now
            elif type(outcome) is Lost and self._clock.now - answered_at > LOST_SECONDS:
                operation.close()
                return Unsettled(outcome.reason)

    def _report_speed(self) -> Life:
        beat = yield from self._session.beat(1.0 / self._step_seconds, SYNC_BOUND)
        if type(beat) is Beat and beat.recommended_sync_every is not None:
            self._sync_every = max(beat.recommended_sync_every, self._settings.num_fragments)

    def _start_training(self, steps: int) -> Sleep:
        mean = steps * self._step_seconds
        seconds = max(_LEAST_SHARE * mean, mean + self._random.gauss(0.0, self._site.step_jitter) * mean / steps**0.5)
        self._training_since, self._training_seconds, self._training_steps = self._clock.now, seconds, steps
        return Sleep(seconds)


@cache
def schedule(sync_every: int, num_fragments: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """How many steps to train, and what to submit after them, again and again in a cycle of `sync_every` steps."""
    found, before = [], 0
    for step in range(1, sync_every + 1):
        fragments = due(step, sync_every, num_fragments)
        if fragments:
            found.append((step - before, fragments))
            before = step
    return tuple(found)
