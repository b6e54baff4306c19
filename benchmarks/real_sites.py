"""A scenario of the simulator, run for real: a server, and workers that reach it through throttled sockets."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.simulator.scenario import Scenario, Site
from onstep.diloco.worker import DiLoCoWorker
from throttled_proxy import ThrottledProxy

_TOKEN = "of-this-benchmark"
_BYTES_PER_MBIT = 125_000.0


@dataclass
class RealRun:
    """What was measured; the first round, in which everybody joins, is not in it."""

    round_seconds: list[float]
    step_seconds: dict[str, float]
    """Mean duration of a step at each site: that of the scenario, and what the machine added to it."""

    def as_measured(self, scenario: Scenario) -> Scenario:
        """The scenario with the step times that its sites really had."""
        sites = {
            name: dataclasses.replace(site, step_seconds=self.step_seconds[name])
            for name, site in scenario.sites.items()
        }
        return dataclasses.replace(scenario, sites=sites)


def run_for_real(scenario: Scenario) -> RealRun:
    """Run the scenario with sockets and threads; a step waits as long as the site's, and trains almost nothing.

    Every site has one worker, in a thread of its own.
    """
    torch.manual_seed(0)
    model = _model(scenario.parameters)
    steps: dict[str, float] = {}
    with ExitStack() as stack:
        server = stack.enter_context(DiLoCoServer(model, settings=scenario.settings, port=0, token=_TOKEN))
        addresses = [stack.enter_context(_proxy(server, site)).port for site in scenario.sites.values()]
        commits = _Commits(server, scenario.rounds)
        workers = [
            threading.Thread(target=_work, args=(scenario, name, port, commits, steps), daemon=True)
            for name, port in zip(scenario.sites, addresses, strict=True)
        ]
        for worker in workers:
            worker.start()
        times = commits.watch()
        for worker in workers:
            worker.join()
    return RealRun([after - before for before, after in itertools.pairwise(times)], steps)


class _Commits:
    """When the server committed which round."""

    def __init__(self, server: DiLoCoServer, rounds: int) -> None:
        self._server, self._rounds = server, rounds
        self.is_over = threading.Event()

    def watch(self) -> list[float]:
        """Wait for all rounds; returns the time of each commit."""
        times: list[float] = []
        while len(times) < self._rounds:
            if self._server.sync_round > len(times):
                times.append(time.monotonic())
            time.sleep(0.002)
        self.is_over.set()
        return times


def _proxy(server: DiLoCoServer, site: Site) -> ThrottledProxy:
    assert site.workers == 1
    assert site.upload_mbit is not None
    assert site.download_mbit is not None
    return ThrottledProxy(
        server.port,
        upload=site.upload_mbit * _BYTES_PER_MBIT,
        download=site.download_mbit * _BYTES_PER_MBIT,
        latency=site.round_trip_ms / 2000.0,
    )


def _model(parameters: int) -> nn.Linear:
    return nn.Linear(parameters // 100, 100, bias=False)


def _work(scenario: Scenario, name: str, port: int, commits: _Commits, steps: dict[str, float]) -> None:
    model = _model(scenario.parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    client = DiLoCoClient(f"127.0.0.1:{port}", token=_TOKEN)
    step_seconds, durations = scenario.sites[name].step_seconds, []
    with DiLoCoWorker(model, optimizer, "", worker_id=name, client=client) as worker:
        while not commits.is_over.is_set():
            started, num_syncs = time.monotonic(), worker.metrics.sync_count
            model.weight.grad = torch.full_like(model.weight, 0.1)
            time.sleep(max(0.0, started + step_seconds - time.monotonic()))
            optimizer.step()
            if worker.metrics.sync_count == num_syncs:
                durations.append(time.monotonic() - started)
    steps[name] = statistics.fmean(durations)
