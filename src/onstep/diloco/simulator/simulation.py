"""Builds a simulation and runs it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.simulator.environment.churn import Attendance, Churn
from onstep.diloco.simulator.environment.clock import Clock
from onstep.diloco.simulator.measures import Measures, SiteCounts
from onstep.diloco.simulator.members import Members, World, lines
from onstep.diloco.simulator.payload import Payload
from onstep.diloco.simulator.report import Report, make_report
from onstep.diloco.simulator.scenario import Scenario
from onstep.diloco.simulator.server import SimulatedServer

LONGEST = 1000.0
"""A simulation without `hours` is over after so many times its duration without communication."""


def simulate(scenario: Scenario, on_round: Callable[[int], None] | None = None) -> Report:
    """Run a scenario and report on it; the same scenario gives the same report on every machine.

    Args:
        on_round: called after each committed round with the number of rounds so far.
    """
    return _Simulation(scenario, on_round).run()


class _Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, on_round: Callable[[int], None] | None) -> None:
        self._scenario, self._on_round = scenario, on_round
        self._clock, self._settings = Clock(), scenario.settings
        self._measures = Measures({name: SiteCounts() for name in scenario.sites})
        self._site_of: dict[str, str] = {}
        self._rounds_left = scenario.total_rounds
        self._server = self._new_server()
        self._attendance = Attendance(
            self._clock, self._settings.min_workers, scenario.settings.heartbeat_timeout, self._server.evict
        )
        self._members = self._new_members()

    def run(self) -> Report:
        """Run until the rounds are done or the time is over."""
        for members in self._members:
            members.start()
        self._attendance.begin_round()
        with _without_collections():
            self._clock.run(self._limit())
        for members in self._members:
            members.end()
        return make_report(self._scenario, self._measures, self._server.coordinator.counts, self._clock)

    def _new_server(self) -> SimulatedServer:
        one, settings = self._scenario.server, self._settings
        hours = one.hours_between_failures
        server = SimulatedServer(self._clock, settings, one.round_seconds, self._commit, can_fail=hours is not None)
        random = self._scenario.random("server")
        Churn(self._clock, random, hours, one.minutes_away, self._fail_server, self._restart_server)
        return server

    def _new_members(self) -> list[Members]:
        scenario, settings = self._scenario, self._settings
        payload = Payload(scenario.parameters, settings.num_fragments, settings.codec)
        server_lines = lines(self._clock, scenario.server.upload_mbit, scenario.server.download_mbit)
        world = World(self._clock, scenario, settings, payload, self._server, self._attendance, *server_lines)
        found = [Members(world, name, self._measures.sites[name]) for name in scenario.sites]
        for name, members in zip(scenario.sites, found, strict=True):
            self._site_of |= dict.fromkeys(members.worker_ids, name)
        return found

    def _limit(self) -> float:
        if self._scenario.hours is not None:
            return self._scenario.hours * 3600.0
        slowest = max(site.step_seconds for site in self._scenario.sites.values())
        return LONGEST * self._scenario.rounds * self._settings.sync_every * slowest

    def _commit(self, closed: Closed) -> None:
        lacked_quorum = self._attendance.lacked_quorum
        self._measures.note_round(closed, self._clock.now, self._site_of, lacked_quorum=lacked_quorum)
        self._attendance.begin_round()
        if self._settings.mode == "async" or closed.version <= self._scenario.rounds:
            self._rounds_left -= 1
        if self._rounds_left == 0:
            self._clock.stop()
        if self._on_round is not None:
            self._on_round(len(self._measures.rounds))

    def _fail_server(self) -> None:
        self._measures.server_failures += 1
        self._server.fail()

    def _restart_server(self) -> None:
        self._server.restart()
        self._attendance.server_is_back()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable the garbage collector: it would spend a fifth of the time on millions of live objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
