"""A run of real processes, what is done to them, and what they must have done in spite of it."""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from onstep.diloco.outer import nesterov_sgd
from tests.support.diloco.fault_jobs import STOP, read
from tests.support.diloco.fault_proxy import Proxy
from tests.support.forked_processes import Child, Processes, output_of

JOBS = "tests.support.diloco.fault_jobs"
BOUND = 4.0
"""Seconds that a worker waits for a result."""
PATIENCE = 30.0
"""Seconds in which anything must have happened, on a machine that does much else."""


class FaultRun:
    """A server and its workers, each behind a proxy of its own."""

    def __init__(self, processes: Processes, directory: Path, num_workers: int = 3, min_workers: int = 2) -> None:
        self._processes, self.directory = processes, directory
        self.num_workers, self.min_workers = num_workers, min_workers
        directory.mkdir(parents=True)
        self.proxies = [Proxy(lambda: ("127.0.0.1", self.port)) for _ in range(num_workers)]
        self.workers: dict[int, Child] = {}
        self.server: Child
        self.port = 9
        self.killed: set[int] = set()
        """Workers of which a process was killed: what they trained since their last submission is lost."""
        self.stopped_seconds = 0.0
        self._starts = 0

    def start(self, **server: object) -> None:
        """Start all processes."""
        self.start_server(**server)
        for index in range(self.num_workers):
            self.start_worker(index)

    def start_server(self, **more: object) -> None:
        settings = {"num_workers": self.num_workers, "min_workers": self.min_workers, **more}
        (self.server,) = self._processes.start(JOBS, "server", self.directory, settings)
        self._starts += 1
        started = self.until(lambda: [one for one in self.lines("server") if "started" in one][self._starts - 1 :])
        self.port = started[0]["port"]

    def start_worker(self, index: int) -> None:
        settings = {
            "index": index,
            "name": f"w{index}",
            "num_workers": self.num_workers,
            "bound": BOUND,
            **self.place_of(index),
        }
        (self.workers[index],) = self._processes.start(JOBS, "worker", self.directory, settings)

    def place_of(self, index: int) -> dict[str, object]:
        """Where a worker finds its server."""
        return {"address": self.proxies[index].address}

    def cut(self, indices: Iterable[int], is_cut: bool) -> None:
        """Cut workers off from the server, or connect them again."""
        for index in indices:
            self.proxies[index].is_cut = is_cut

    def kill_server(self) -> None:
        self.server.send_signal(signal.SIGKILL)
        self.server.wait()

    def kill_worker(self, index: int) -> None:
        self.workers[index].send_signal(signal.SIGKILL)
        self.workers[index].wait()
        self.killed.add(index)

    def pause(self, child: Child, seconds: float) -> None:
        """Stop a process for a while."""
        child.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        child.send_signal(signal.SIGCONT)
        self.stopped_seconds += seconds

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a process has written down."""
        path = self.directory / f"{name}.jsonl"
        return read(path)

    def versions(self) -> list[int]:
        """Newest version of each worker."""
        found = [[one["version"] for one in self.lines(f"w{index}") if "version" in one] for index in self.workers]
        return [versions[-1] if versions else -1 for versions in found]

    def until(self, what: Callable[[], Any]) -> Any:
        """Wait for something; returns it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := what()):
            assert time.monotonic() < deadline, f"{self.versions()}\n{output_of(self.directory)}"
            time.sleep(0.01)
        return found

    def advance(self, rounds: int) -> None:
        """Wait until all workers are so many versions further than the newest is now."""
        newest = max(0, *self.versions())
        self.until(lambda: min(self.versions()) >= newest + rounds)

    def end(self) -> None:
        """End all processes; the server is the last."""
        (self.directory / STOP).touch()
        for child in self.workers.values():
            assert child.wait(PATIENCE) == 0, output_of(self.directory)
        assert self.server.wait(PATIENCE) == 0, output_of(self.directory)

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        for child in (*self.workers.values(), self.server):
            with suppress(ProcessLookupError):
                if child.is_alive:
                    child.end()
        for proxy in self.proxies:
            proxy.close()

    def trained(self, index: int) -> int:
        """Steps that a worker has taken, in all its processes."""
        return sum(line.get("step", 0) for line in self.lines(f"w{index}"))

    def num_committed(self) -> int:
        return sum("persisted" in line for line in self.lines("server"))

    def num_committed_when_quiet(self) -> int:
        """The number of commits, once what was under way has ended."""
        while True:
            before = self.num_committed()
            time.sleep(0.5)
            if self.num_committed() == before:
                return before

    def committed(self) -> list[dict[str, Any]]:
        """The rounds that were committed, in order: of each version, the one that reached the disk."""
        rounds: dict[int, dict[str, Any]] = {}
        open_round: dict[str, Any] | None = None
        for line in self.lines("server"):
            if "closing" in line:
                open_round = line
            elif open_round is not None and ("persisted" in line or line.get("started", -1) >= open_round["closing"]):
                assert open_round["closing"] not in rounds, "a version was committed twice"
                rounds[open_round["closing"]] = open_round
                open_round = None
            elif "started" in line:
                open_round = None  # killed before it reached the disk
        return [rounds[version] for version in sorted(rounds)]

    def check(self) -> Counter[str]:
        """Check what must hold after any fault; returns the counts.

        - Of each version, all workers have the same parameters.
        - No submission is in two versions, and no version is below the quorum.
        - The parameters are what torch's SGD makes of the weighted averages.
        - The steps of a worker that are counted, and those that it still has, are all that it took; none twice. (Of a
          worker that was killed, some are lost.)
        - Nobody waited past the bound.
        """
        rounds = self.committed()
        assert [one["closing"] for one in rounds] == list(range(1, len(rounds) + 1))
        parts = [part for one in rounds for part in one["contributions"]]
        identities = [(part["worker"], part["sequence"]) for part in parts]
        assert len(set(identities)) == len(identities), "counted twice"
        for one in rounds:
            assert len({part["worker"] for part in one["contributions"]}) >= self.min_workers
        counts = Counter(rounds=len(rounds), contributions=len(parts))
        counts += self._check_digests()
        self._check_parameters(rounds)
        for index in self.workers:
            counts += self._check_steps(index, parts)
        return counts

    def _check_digests(self) -> Counter[str]:
        digests: dict[int, set[str]] = defaultdict(set)
        longest, seen = 0.0, 0
        for index in self.workers:
            for line in self.lines(f"w{index}"):
                if "version" in line:
                    digests[line["version"]].add(line["digest"])
                    longest = max(longest, line["waited"])
                    seen += 1
        assert all(len(some) == 1 for some in digests.values()), "workers differ"
        assert longest <= BOUND + self.stopped_seconds + 5.0, f"waited {longest:.1f} s"
        return Counter(compared_digests=seen)

    def _check_parameters(self, rounds: list[dict[str, Any]]) -> None:
        (ended,) = [line for line in self.lines("server") if "ended" in line][-1:]
        entries = torch.zeros(self.num_workers, dtype=torch.float64, requires_grad=True)
        optimizer = nesterov_sgd([entries])
        for one in rounds[: ended["ended"]]:  # a round that was written while the server ended is for its next start
            weights = torch.tensor([part["weight"] for part in one["contributions"]], dtype=torch.float64)
            differences = torch.tensor([part["difference"] for part in one["contributions"]], dtype=torch.float64)
            entries.grad = (weights / weights.sum()) @ differences
            optimizer.step()
        torch.testing.assert_close(torch.tensor(ended["parameters"], dtype=torch.float64), entries.detach())

    def _check_steps(self, index: int, parts: list[dict[str, Any]]) -> Counter[str]:
        lines = self.lines(f"w{index}")
        trained = self.trained(index)
        mine = {part["sequence"]: -part["difference"][index] for part in parts if part["worker"] == f"w{index}"}
        counted = sum(mine.values())
        (end,) = [line for line in lines if "progress" in line][-1:]
        left = end["progress"] - mine.get(end["pending"], 0.0)
        known = counted + left
        assert known <= trained + 1e-6, f"w{index}: {counted} steps counted, {left} left, of {trained}"
        if index not in self.killed:
            assert abs(known - trained) < 1e-6, f"w{index}: {counted} steps counted, {left} left, of {trained}"
        return Counter(steps=trained, steps_counted=round(counted))


def minority_is_left(run: FaultRun, **server: object) -> Counter[str]:
    """Two of three workers are cut off, train on alone for longer than they wait for results, and come back."""
    run.start(**server)
    run.advance(2)
    run.cut((0, 1), True)
    before = run.num_committed_when_quiet()
    steps = [run.trained(index) for index in range(3)]
    run.until(lambda: all(run.trained(index) > steps[index] + 2 for index in range(3)))
    assert run.num_committed() == before, "a minority committed"
    run.cut((0, 1), False)
    run.advance(3)
    run.end()
    return run.check()
