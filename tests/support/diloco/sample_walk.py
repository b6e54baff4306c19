"""Follows every training sample of a simulated run in which workers, server and network do all they can do wrong.

Time is virtual and everything follows from a seed. Requests and answers are lost, duplicated and delayed, so that they
overtake each other; workers and the server are killed at any instant and come back, workers from an older checkpoint
or without one. The body of a submission is the list of the samples behind it, so that it can be seen how often each
sample is counted in a committed version.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace

from onstep.diloco.protocol.aging import reason_to_drop
from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import Await, Dropped, NotYet, Request, Settings, Submit
from onstep.diloco.protocol.operations import (
    Answer,
    Effect,
    Lost,
    Outcome,
    Send,
    ServerLostError,
    Sleep,
)
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.protocol.session import WorkerSession

Sample = tuple[int, int]
"""Share of the data, and index in it."""
Life = Generator[Effect, Outcome, None]


@dataclass(frozen=True, slots=True)
class Dangers:
    """Probabilities for each message, and mean seconds between the deaths of each process (0: it lives for ever)."""

    lost: float = 0.1
    duplicated: float = 0.1
    delayed: float = 0.1
    worker_dies: float = 200.0
    server_dies: float = 300.0
    leaves: float = 0.02
    """Probability that a worker leaves after a round; it comes back later."""
    bound: float = 20.0
    """Seconds that a worker waits for a result before it trains on."""


@dataclass(slots=True)
class Disk:
    """What is left of a worker when it is killed: its newest checkpoint."""

    session: dict[str, object] | None = None
    progress: tuple[Sample, ...] = ()
    cursor: int = 0
    base: int = 0


class Walk:
    """The world."""

    def __init__(self, seed: int, settings: Settings, dangers: Dangers, spare: int = 0) -> None:
        """`spare` workers more than the data has shares come as well, and stay when a share is free."""
        self.random, self.settings, self.dangers = random.Random(seed), settings, dangers
        self.now, self._events, self._number = 0.0, [], 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.disk: dict[str, object] | None = None
        self.committed: list[Closed] = []
        self.counted: Counter[Sample] = Counter()
        self.confirmed: set[Sample] = set()
        self.trained: set[Sample] = set()
        self.given_up: set[Sample] = set()
        self.seen: Counter[str] = Counter()
        self.server = Server(self)
        self.workers = [Worker(self, f"w{number}") for number in range(settings.num_workers + spare)]

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, action))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def heal(self) -> None:
        """From now on, nothing goes wrong."""
        self.dangers = Dangers(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, self.dangers.bound)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def latency(self) -> float:
        return self.random.uniform(5.0, 60.0) if self.chance(self.dangers.delayed) else self.random.uniform(0.01, 0.2)


class Server:
    """A coordinator, the bodies it has, and what it has persisted."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.is_up = True
        self.incarnation = 0
        self.start()

    def start(self) -> None:
        walk = self.walk
        self.coordinator = Coordinator(walk.settings, run_id="run", fingerprint="model", state=walk.disk, now=walk.now)
        self.persist(self.coordinator.state_dict())
        self.bodies: dict[Submit, tuple[Sample, ...]] = {}
        self.closed: list[Closed] = []
        self.is_up, self.is_executing = True, False
        self.incarnation += 1
        self.guarded(walk.random.uniform(0.0, 5.0), self.tick)
        if walk.dangers.server_dies:
            self.guarded(walk.random.expovariate(1 / walk.dangers.server_dies), self.die)

    def guarded(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later, unless the server is killed before."""
        incarnation = self.incarnation
        self.walk.at(seconds, lambda: action() if self.is_up and self.incarnation == incarnation else None)

    def die(self) -> None:
        self.is_up = False
        self.walk.seen["server killed"] += 1
        self.walk.at(self.walk.random.uniform(0.1, 40.0), self.start)

    def persist(self, state: dict[str, object]) -> None:
        self.walk.disk = json.loads(json.dumps(state))

    def tick(self) -> None:
        self.coordinator.tick(self.walk.now)
        self.execute()
        self.guarded(1.0, self.tick)

    def receive(self, request: Request, body: object, answer: Callable[[Answer], None]) -> None:
        if not self.is_up:
            return
        revision = self.coordinator.revision
        if isinstance(request, Submit) and self.coordinator.preview(request, self.walk.now) is None:
            assert isinstance(body, tuple)
            self.bodies[request] = body
        reply = self.coordinator.handle(request, self.walk.now)
        if self.coordinator.revision != revision:
            self.persist(self.coordinator.state_dict())
        self.execute()
        if isinstance(request, Await) and isinstance(reply, NotYet) and reply.is_pending and request.wait > 1.0:
            later = replace(request, wait=request.wait - 1.0)
            self.guarded(1.0, lambda: self.receive(later, body, answer))
        else:
            answer(Answer(reply))

    def execute(self) -> None:
        """Execute the rounds that are closed, one after the other."""
        self.closed += self.coordinator.take_closed()
        if self.closed and not self.is_executing:
            self.is_executing = True
            self.guarded(self.walk.random.uniform(0.0, 1.0), self.write)

    def write(self) -> None:
        walk, closed = self.walk, self.closed[0]
        self.persist(self.coordinator.state_after(closed, f"digest{closed.version}"))
        walk.committed.append(closed)
        for one in closed.contributions:
            walk.counted.update(self.bodies[one.submit])
        if walk.dangers.server_dies and walk.chance(0.05):
            self.die()  # just when the round is on disk
        else:
            self.commit(self.closed.pop(0))

    def commit(self, closed: Closed) -> None:
        self.coordinator.committed(closed, f"digest{closed.version}", self.walk.now)
        self.is_executing = False
        self.execute()


class Worker:
    """A process that trains and submits, is killed, and is started again."""

    def __init__(self, walk: Walk, name: str) -> None:
        self.walk, self.name = walk, name
        self.incarnation = 0
        self.disk = Disk()
        self.progress: tuple[Sample, ...] = ()
        self.num_results = 0
        self.start()

    def start(self) -> None:
        walk = self.walk
        self.incarnation += 1
        if walk.dangers.worker_dies:
            self.guarded(walk.random.expovariate(1 / walk.dangers.worker_dies), self.die)
        life = self.live()
        self.perform(life, next(life))

    def guarded(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later, unless the worker is killed before."""
        incarnation = self.incarnation
        self.walk.at(seconds, lambda: action() if self.incarnation == incarnation else None)

    def die(self) -> None:
        self.incarnation += 1
        self.walk.seen["worker killed"] += 1
        if self.walk.chance(0.3):
            self.disk = Disk()
        self.walk.at(self.walk.random.uniform(0.1, 60.0), self.start)

    def perform(self, life: Life, effect: Effect) -> None:
        """Do what a worker's program asks for, and continue it with the outcome."""
        if isinstance(effect, Sleep):
            self.guarded(effect.seconds, lambda: self.perform(life, life.send(None)))
        else:
            self.send(life, effect)

    def send(self, life: Life, effect: Send) -> None:
        walk, answers, incarnation = self.walk, [0], self.incarnation

        def outcome(received: Answer | Lost) -> None:
            answers[0] += 1
            if answers[0] == 1 and self.incarnation == incarnation:
                self.perform(life, life.send(received))

        def answer(reply: Answer) -> None:
            if not walk.chance(walk.dangers.lost):
                walk.at(walk.latency(), lambda: outcome(reply))

        for _ in range(1 + walk.chance(walk.dangers.duplicated)):
            if not walk.chance(walk.dangers.lost):
                walk.at(walk.latency(), lambda: walk.server.receive(effect.request, effect.body, answer))
        wait = effect.request.wait if isinstance(effect.request, Await) else 0.0
        self.guarded(wait + 3.0, lambda: outcome(Lost("timed out")))

    def live(self) -> Life:
        walk, disk = self.walk, self.disk
        session = WorkerSession(self.name, f"{self.name}/{self.incarnation}", "model", clock=lambda: walk.now)
        if disk.session is not None:
            session.load_state_dict(disk.session)
        registered = yield from session.join(1e9)
        self.progress, cursor, base = disk.progress, disk.cursor, disk.base
        if not registered.has_share:
            yield from self.without_share(session)
        if disk.session is None or session.superseded:
            self.progress, cursor, base = (), registered.slot_steps, registered.versions[0]
        while True:
            yield Sleep(walk.random.uniform(8.0, 12.0))
            newest = session.registered
            assert newest is not None
            if newest.slot != registered.slot:
                walk.seen["got another share"] += 1
                registered, cursor = newest, newest.slot_steps
            if not newest.has_share:
                yield from self.without_share(session)
            fresh = tuple((registered.slot, cursor + offset) for offset in range(walk.random.randint(1, 3)))
            self.progress, cursor = self.progress + fresh, cursor + len(fresh)
            walk.trained.update(fresh)
            self.checkpoint(session, cursor, base)
            if session.pending(0) is None and self.progress:
                steps = len(self.progress)
                session.begin(0, base_version=base, tokens=steps, steps=steps, body=self.progress)
            self.checkpoint(session, cursor, base)
            base = yield from self.get_result(session, base)
            if not self.progress:
                registered = yield from session.join(1e9)
                cursor = registered.slot_steps  # what was given up is trained on again
            self.checkpoint(session, cursor, base)
            if walk.chance(walk.dangers.leaves):
                walk.seen["left"] += 1
                yield from session.leave()
                self.die()
                yield Sleep(math.inf)

    def without_share(self, session: WorkerSession) -> Life:
        """Leave, and come back later without anything."""
        self.walk.seen["found no share"] += 1
        yield from session.leave()
        self.die()
        self.disk = Disk()
        yield Sleep(math.inf)

    def get_result(self, session: WorkerSession, base: int) -> Generator[Effect, Outcome, int]:
        """Wait for the submission's result; returns the version that the oldest remaining work began from."""
        pending = session.pending(0)
        assert pending is not None
        latest, found = self.walk.now + self.walk.dangers.bound + 30.0, None
        with suppress(ServerLostError):
            found = yield from session.result(0, self.walk.dangers.bound)
        assert self.walk.now <= latest, "waited past the bound"
        if found is None:
            self.walk.seen["late"] += 1
            return base
        self.num_results += 1
        if isinstance(found, Dropped):
            self.walk.seen["dropped"] += 1
            self.give_up()
            return found.version
        self.walk.confirmed.update(self.progress[: pending.steps])
        self.progress = self.progress[pending.steps :]
        if self.progress and reason_to_drop(found.ready.version - base, self.walk.settings) is None:
            return base
        self.give_up()
        return found.ready.version

    def give_up(self) -> None:
        self.walk.given_up.update(self.progress)
        self.progress = ()

    def checkpoint(self, session: WorkerSession, cursor: int, base: int) -> None:
        if self.walk.chance(0.3):
            self.disk = Disk(json.loads(json.dumps(session.state_dict())), self.progress, cursor, base)
