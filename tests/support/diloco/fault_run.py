"""A run of real processes, what is done to them, and what they must have done in spite of it."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from onstep.diloco.client import DiLoCoClient
from tests.support.diloco.fault_checks import Check
from tests.support.diloco.fault_jobs import STOP, TOKEN, read
from tests.support.diloco.fault_modes import SYNC, Mode
from tests.support.diloco.fault_proxy import Proxy
from tests.support.forked_processes import Child, Processes, output_of
from tests.support.waiting import until

JOBS = "tests.support.diloco.fault_jobs"
BOUND = 4.0
"""Seconds that a worker waits for a result."""
QUIET = 3.0
"""Seconds without a commit: longer than a round with a quorum waits for those that are missing."""


class FaultRun:
    """A server and its workers, each behind a proxy of its own."""

    def __init__(self, processes: Processes, directory: Path, mode: Mode = SYNC, *, bound: float = BOUND) -> None:
        self._processes, self.directory, self.mode, self.bound = processes, directory, mode, bound
        self.num_workers, self.min_workers = 3, 2
        directory.mkdir(parents=True)
        self.proxies = [Proxy(lambda: ("127.0.0.1", self.port)) for _ in range(self.num_workers)]
        self.workers: dict[int, Child] = {}
        self.server: Child
        self.port = 9
        self.lossy: set[int] = set()
        """Workers of which a process was killed or left."""
        self.stopped_seconds = 0.0
        self._starts = 0

    def start(self, **server: object) -> None:
        """Start all processes."""
        self.start_server(**server)
        for index in range(self.num_workers):
            self.start_worker(index)

    def start_server(self, **more: object) -> None:
        run = self.mode.settings(self.num_workers, self.min_workers)
        settings = {"run": run, "dn_buffer_size": self.mode.dn_buffer_size, **more}
        (self.server,) = self._processes.start(JOBS, "server", self.directory, settings)
        self._starts += 1
        started = self.until(lambda: [one for one in self.lines("server") if "started" in one][self._starts - 1 :])
        self.port = started[0]["port"]

    def start_worker(self, index: int) -> None:
        settings = {
            "index": index,
            "name": f"w{index}",
            "num_workers": self.num_workers,
            "num_fragments": self.mode.num_fragments,
            "has_checkpoints": self.mode.has_checkpoints,
            "bound": self.bound,
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
        self.lossy.add(index)

    def leave(self, index: int) -> None:
        """Ask a worker to leave the run; it is gone when its process has ended."""
        self.lossy.add(index)
        (self.directory / f"leave-{self.workers[index].pid}").touch()

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
        """Newest version of each worker; of its oldest fragment."""
        found = [
            [min(one["versions"]) for one in self.lines(f"w{index}") if "versions" in one] for index in self.workers
        ]
        return [versions[-1] if versions else -1 for versions in found]

    def until(self, what: Callable[[], Any]) -> Any:
        """Wait for something; returns it."""
        return until(what, lambda: f"{self.versions()}\n{output_of(self.directory)}")

    def advance(self, rounds: int) -> None:
        """Wait until all workers are so many versions further than the newest is now."""
        newest = max(0, *self.versions())
        self.until(lambda: min(self.versions()) >= newest + rounds)

    def end(self) -> None:
        """End all processes; the server is the last."""
        (self.directory / STOP).touch()
        for child in self.workers.values():
            assert child.wait() == 0, output_of(self.directory)
        assert self.server.wait() == 0, output_of(self.directory)

    def close(self) -> None:
        """Leave nothing behind, whatever happened; what starts only now ends by itself."""
        (self.directory / STOP).touch()
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
        """The number of commits, once what was under way has ended and no round has a quorum."""
        with DiLoCoClient(f"127.0.0.1:{self.port}", token=TOKEN) as client:
            while True:
                before = self.num_committed()
                time.sleep(QUIET)
                arrived = [len(one["arrived"]) for one in client.get_status()["rounds"]]
                if self.num_committed() == before and max(arrived) < self.min_workers:
                    return before

    def check(self) -> Counter[str]:
        """Check what must hold after any fault, see `Check`, and that nobody waited past the bound; the counts."""
        workers = {index: self.lines(f"w{index}") for index in self.workers}
        waited = max(line["waited"] for lines in workers.values() for line in lines if "waited" in line)
        assert waited <= self.bound + self.stopped_seconds + 5.0, f"waited {waited:.1f} s"
        lossy = frozenset(self.lossy)
        return Check(self.mode, self.num_workers, self.min_workers, self.lines("server"), workers, lossy).run()


def server_is_away(run: FaultRun, num_steps: int) -> Counter[str]:
    """The server is killed, all workers train on alone for so many steps at least, and it is started again."""
    run.start()
    run.advance(2)
    run.kill_server()
    steps = [run.trained(index) for index in range(run.num_workers)]
    run.until(lambda: all(run.trained(index) >= steps[index] + num_steps for index in range(run.num_workers)))
    run.start_server()
    run.advance(3)
    run.end()
    return run.check()


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
