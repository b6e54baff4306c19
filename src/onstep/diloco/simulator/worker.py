"""Simulates a worker: it trains, submits what the protocol's session submits, and may be killed and come back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

from onstep.diloco.fragments import due
from onstep.diloco.progress import Amount, Progress
from onstep.diloco.protocol.aging import reason_to_drop
from onstep.diloco.protocol.messages import Dropped, Settings
from onstep.diloco.protocol.operations import Operation, ServerLostError, Sleep
from onstep.diloco.protocol.session import WorkerSession
from onstep.diloco.simulator.connection import Connection
from onstep.diloco.simulator.environment.clock import Clock
from onstep.diloco.simulator.environment.tasks import Task
from onstep.diloco.simulator.measures import SiteCounts
from onstep.diloco.simulator.scenario import Site
from onstep.diloco.simulator.server import FINGERPRINT

Life = Generator[Any, Any, None]
SYNC_BOUND = 600.0
"""Seconds that a worker waits for a round before it continues to train."""
LOST_SECONDS = 14.0
"""Seconds without any answer after which it continues: 2 + 4 + 8, for `max_sync_retries=3`."""
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
    ) -> None:
        self.worker_id, self.connection = worker_id, connection
        self.is_alive = False
        self._site, self._settings, self._clock, self._counts, self._random = site, settings, clock, counts, random
        self._step_seconds = site.step_seconds * max(_LEAST_SHARE, random.gauss(1.0, site.worker_spread))
        self._tasks: list[Task] = []
        self._num_sessions = 0
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
            lost_seconds=LOST_SECONDS,
            poll_seconds=SYNC_BOUND,  # nothing cuts a virtual connection while its `Await` is held
        )
        self._versions = [0] * self._settings.num_fragments
        self._origins = [0] * self._settings.num_fragments
        self._progress = Progress(self._settings.num_fragments)
        self._sync_every = self._settings.sync_every
        self._run(self._live())

    def kill(self) -> None:
        """Die: work that was not submitted is lost."""
        self.stop_training()
        self.is_alive = False
        self._counts.killed_steps += sum(map(self._steps_to_lose, range(self._settings.num_fragments)))
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _steps_to_lose(self, fragment: int) -> int:
        """Steps of a fragment that no server has."""
        pending = self._session.pending(fragment)
        is_delivered = pending is not None and self.connection.delivered.get(fragment, -1) >= pending.sequence
        steps = self._progress.since_base(fragment).steps
        return steps - pending.steps if pending is not None and is_delivered else steps

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
        self._progress.count(steps * self._site.tokens_per_step, steps)

    def _run(self, life: Generator[Any, Any, Any]) -> Task:
        self._tasks = [task for task in self._tasks if not task.is_over]
        task = Task(self._clock, self.connection, life)
        self._tasks.append(task)
        task.resume(None)
        return task

    def _live(self) -> Life:
        """Join, fetch the parameters, then train and submit without end."""
        yield from self._join()
        settings = self._settings
        in_flight: dict[int, Task] = {}
        while True:
            for steps, awaited, fragments in schedule(
                self._sync_every, settings.num_fragments, settings.overlap_steps or 0
            ):
                yield self._start_training(steps)
                self.stop_training()
                for fragment in awaited:
                    task = in_flight.pop(fragment, None)
                    if task is not None and not task.is_over:
                        yield task
                if fragments and self._site.sync_seconds > 0.0:
                    yield Sleep(self._site.sync_seconds)
                if fragments and settings.is_overlapped:
                    in_flight |= dict.fromkeys(fragments, self._run(self._exchange(fragments)))
                elif fragments:
                    yield from self._exchange(fragments)
            if settings.dylu:
                yield from self._report_speed()

    def _join(self) -> Life:
        is_joined = False
        while not is_joined:
            with suppress(ServerLostError):
                yield from self._session.join(SYNC_BOUND)
                is_joined = True
        for fragment in range(self._settings.num_fragments):
            yield from self._fetch(fragment)
        self._origins = list(self._versions)

    def _fetch(self, fragment: int) -> Life:
        """Get the newest parameters, however long it lasts."""
        while True:
            with suppress(ServerLostError):
                delivery = yield from self._session.fetch(fragment, SYNC_BOUND)
                self._versions[fragment] = delivery.ready.version
                return

    def _exchange(self, fragments: tuple[int, ...]) -> Life:
        """Get the result of what is pending, then submit the work since; a late result is requested the next time."""
        for fragment in fragments:
            with suppress(ServerLostError):
                if self._session.pending(fragment) is not None:
                    yield from self._get_result(fragment, is_late=True)
                if self._progress.num_steps(fragment):
                    self._begin(fragment)
                    yield from self._get_result(fragment, is_late=False)

    def _begin(self, fragment: int) -> None:
        amount = self._progress.submit(fragment)
        self._session.begin(
            fragment,
            base_version=self._origins[fragment],
            tokens=int(amount.tokens),
            steps=amount.steps,
            codec=self._settings.codec,
            body=self.connection.payload.encoded[fragment],
        )

    def _get_result(self, fragment: int, *, is_late: bool) -> Operation[None]:
        """Continue from the result; later steps that a late one leaves behind keep the version that they began from."""
        found = yield from self._session.result(fragment, SYNC_BOUND, self._versions[fragment])
        is_counted = not isinstance(found, Dropped)
        self._progress.end_submission(fragment, is_counted)
        if isinstance(found, Dropped):
            yield from self._fetch(fragment)
        else:
            self._versions[fragment] = found.ready.version
        behind = self._versions[fragment] - self._origins[fragment]
        if not is_counted or (is_late and reason_to_drop(behind, self._settings) is not None):
            self._counts.outdated_steps += self._progress.since_base(fragment).steps
            self._progress.restore(fragment, Amount())
        elif is_late and self._progress.num_steps(fragment):
            return
        self._origins[fragment] = self._versions[fragment]

    def _report_speed(self) -> Life:
        with suppress(ServerLostError):
            beat = yield from self._session.beat(1.0 / self._step_seconds, SYNC_BOUND)
            if beat.recommended_sync_every is not None:
                self._sync_every = max(beat.recommended_sync_every, self._settings.num_fragments)

    def _start_training(self, steps: int) -> Sleep:
        mean = steps * self._step_seconds
        seconds = max(_LEAST_SHARE * mean, mean + self._random.gauss(0.0, self._site.step_jitter) * mean / steps**0.5)
        self._training_since, self._training_seconds, self._training_steps = self._clock.now, seconds, steps
        return Sleep(seconds)


@cache
def schedule(
    sync_every: int, num_fragments: int, overlap_steps: int = 0
) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
    """How many steps to train, whose results to wait for and what to submit then, again and again in a cycle.

    Results are waited for `overlap_steps` after their submission; with 0, before the next submission of any fragment.
    """
    found, before = [], 0
    overlap_steps = min(overlap_steps, sync_every)
    for step in range(1, sync_every + 1):
        submitted = due(step, sync_every, num_fragments)
        awaited = tuple(range(num_fragments)) if submitted else ()
        if overlap_steps:
            awaited = due((step - 1 - overlap_steps) % sync_every + 1, sync_every, num_fragments)
        if submitted or awaited:
            found.append((step - before, awaited, submitted))
            before = step
    return tuple(found)
