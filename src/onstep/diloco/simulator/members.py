"""Simulates the workers of a site, with its line to the server, its failures and its outages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from onstep.diloco.protocol.messages import Settings
from onstep.diloco.simulator.connection import Connection
from onstep.diloco.simulator.environment.churn import Attendance, Churn
from onstep.diloco.simulator.environment.clock import Clock
from onstep.diloco.simulator.environment.network import Line, Path
from onstep.diloco.simulator.measures import SiteCounts
from onstep.diloco.simulator.payload import Payload
from onstep.diloco.simulator.scenario import Scenario
from onstep.diloco.simulator.server import SimulatedServer
from onstep.diloco.simulator.worker import SimulatedWorker

_BYTES_PER_MBIT = 125_000.0


def lines(clock: Clock, upload_mbit: float | None, download_mbit: float | None) -> tuple[list[Line], list[Line]]:
    """The lines from a place to the network and back; none without a limit."""
    up, down = ([] if mbit is None else [Line(clock, mbit * _BYTES_PER_MBIT)] for mbit in (upload_mbit, download_mbit))
    return up, down


@dataclass(frozen=True, slots=True)
class World:
    """The parts of a simulation that all sites share."""

    clock: Clock
    scenario: Scenario
    settings: Settings
    payload: Payload
    server: SimulatedServer
    attendance: Attendance
    server_up: list[Line]
    server_down: list[Line]


class Members:
    """The workers of one site."""

    def __init__(self, world: World, name: str, counts: SiteCounts) -> None:
        self._world, self._site, self._counts = world, world.scenario.sites[name], counts
        self._lines = lines(world.clock, self._site.upload_mbit, self._site.download_mbit)
        self._is_cut = False
        self._alive_since: dict[str, float] = {}
        self._workers = {one: self._worker(one) for one in (f"{name}-{n}" for n in range(self._site.workers))}
        self._plan_failures(name)

    @property
    def worker_ids(self) -> list[str]:
        """Of all workers, alive or not."""
        return list(self._workers)

    def start(self) -> None:
        """Start all workers."""
        for worker in self._workers.values():
            self._world.attendance.come(worker.worker_id)
        for worker in self._workers.values():
            self._start(worker)

    def end(self) -> None:
        """Count the steps that are being taken at the end of the simulation."""
        for worker in self._workers.values():
            if worker.is_alive:
                worker.stop_training()
                self._count_life(worker)

    def _worker(self, worker_id: str) -> SimulatedWorker:
        world, site = self._world, self._site
        latency = site.round_trip_ms / 2000.0
        limit = site.connection_limit
        (up, down), random = self._lines, world.scenario.random
        connection = Connection(
            world.clock,
            world.server,
            Path(world.clock, [*up, *world.server_down], latency, limit),
            Path(world.clock, [*world.server_up, *down], latency, limit),
            world.payload,
            self._counts,
            random(f"{worker_id}/requests"),
            site.request_loss,
        )
        return SimulatedWorker(
            worker_id,
            site,
            world.settings,
            world.clock,
            connection,
            self._counts,
            random(f"{worker_id}/steps"),
        )

    def _plan_failures(self, name: str) -> None:
        site, clock, random = self._site, self._world.clock, self._world.scenario.random
        Churn(clock, random(name), site.hours_between_outages, site.outage_minutes, self._cut, self._reconnect)
        for one, worker in self._workers.items():
            kill, come_back = partial(self._kill, worker), partial(self._come_back, worker)
            hours, minutes = site.hours_between_failures, site.minutes_away
            Churn(clock, random(f"{one}/failures"), hours, minutes, kill, come_back)

    def _start(self, worker: SimulatedWorker) -> None:
        self._alive_since[worker.worker_id] = self._world.clock.now
        worker.start()

    def _kill(self, worker: SimulatedWorker) -> None:
        self._counts.failures += 1
        worker.kill()
        self._count_life(worker)
        if not self._is_cut:
            self._world.attendance.go(worker.worker_id)

    def _come_back(self, worker: SimulatedWorker) -> None:
        if not self._is_cut:
            self._world.attendance.come(worker.worker_id)
        self._start(worker)

    def _count_life(self, worker: SimulatedWorker) -> None:
        self._counts.alive_seconds += self._world.clock.now - self._alive_since[worker.worker_id]

    def _cut(self) -> None:
        self._counts.outages += 1
        self._set_cut(True)

    def _reconnect(self) -> None:
        self._set_cut(False)

    def _set_cut(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        for worker in self._workers.values():
            worker.connection.is_cut = is_cut
            if worker.is_alive and is_cut:
                self._world.attendance.go(worker.worker_id)
            elif worker.is_alive:
                self._world.attendance.come(worker.worker_id)
