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
    stalled_share: dict[str, float]
    """Of the time of each site's worker, for which it did not train: it encoded, waited for the line, or merged."""
    sent_bytes: dict[str, float]
    """Of a submission of all parameters at each site."""

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
    model = _model(scenario)
    found = RealRun([], {}, {}, {})
    with ExitStack() as stack:
        server = stack.enter_context(DiLoCoServer(model, settings=scenario.settings, port=0, token=_TOKEN))
        addresses = [stack.enter_context(_proxy(server, site)).port for site in scenario.sites.values()]
        commits = _Commits(server, scenario.total_rounds)
        workers = [
            threading.Thread(target=_work, args=(scenario, name, port, commits, found), daemon=True)
            for name, port in zip(scenario.sites, addresses, strict=True)
        ]
        for worker in workers:
            worker.start()
        times = commits.watch()
        for worker in workers:
            worker.join()
    found.round_seconds += [after - before for before, after in itertools.pairwise(times)]
    return found


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


def _model(scenario: Scenario) -> nn.Sequential:
    """As many blocks as there are fragments."""
    blocks = scenario.settings.num_fragments
    return nn.Sequential(*[nn.Linear(scenario.parameters // 100 // blocks, 100, bias=False) for _ in range(blocks)])


def _work(scenario: Scenario, name: str, port: int, commits: _Commits, found: RealRun) -> None:
    model = _model(scenario)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    client = DiLoCoClient(f"127.0.0.1:{port}", token=_TOKEN)
    step_seconds, durations = scenario.sites[name].step_seconds, []
    with DiLoCoWorker(model, optimizer, "", worker_id=name, client=client) as worker:
        begun, metrics = time.monotonic(), worker.metrics
        while not commits.is_over.is_set():
            started, waited = time.monotonic(), metrics.total_sync_time
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1)
            time.sleep(max(0.0, started + step_seconds - time.monotonic()))
            optimizer.step()
            if metrics.total_sync_time == waited:
                durations.append(time.monotonic() - started)
        found.stalled_share[name] = metrics.total_sync_time / (time.monotonic() - begun)
        found.sent_bytes[name] = metrics.total_send_bytes / max(1, metrics.sync_count)
    found.step_seconds[name] = statistics.fmean(durations)
