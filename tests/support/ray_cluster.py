"""A Ray cluster of this machine, runs that `onstep launch --ray` starts on it, and kills of their ranks."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import until

PATIENCE = 600.0
"""Ray starts a dozen processes for a run."""
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
WRITER = """\
import json, os, time
from pathlib import Path
from onstep import Callback


class Writer(Callback):
    '''Writes which process trains which step; steps last at least a twentieth of a second.'''

    def on_train_step_end(self, context):
        one = {"step": context.step + 1, "rank": context.rank, "pid": os.getpid(), "time": time.time()}
        with Path(SEEN, f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(one) + chr(10))
        time.sleep(0.05)
"""


@dataclass(frozen=True)
class Seen:
    """A step of one rank."""

    step: int
    rank: int
    pid: int
    time: float


@dataclass(frozen=True)
class Node:
    """A node that the tests have added to a cluster."""

    id: str
    process: subprocess.Popen[bytes]

    def has_started(self, pid: int) -> bool:
        """Whether a process is one of its own."""
        return pid in {one.pid for one in psutil.Process(self.process.pid).children(recursive=True)}

    def kill(self) -> None:
        """Kill all of its processes, as a machine that is switched off."""
        for one in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()


class RayCluster:
    """A head that listens on this machine, with a token of its own."""

    def __init__(self, directory: Path, port: int, environment: dict[str, str]) -> None:
        self.directory, self.environment = directory, environment
        self.address = f"127.0.0.1:{port}"

    @contextmanager
    def node(self, cpus: int) -> Iterator[Node]:
        """Another node, with so many CPUs, until the end of the block."""
        command = [*RAY, "start", "--block", f"--address={self.address}", f"--num-cpus={cpus}", "--disable-usage-stats"]
        known, log = set(self._nodes()), self.directory / f"node-{time.monotonic_ns()}.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            found = until(
                lambda: next(iter(set(self._nodes()) - known), ""),
                log.read_text,
                while_true=lambda: process.poll() is None,
                seconds=PATIENCE,
            )
            yield Node(found, process)
        finally:
            process.kill()
            process.wait()

    def drain(self, node: Node, seconds: int) -> None:
        """Announce that a node will be removed, as a cloud does with a spot instance."""
        command = [*RAY, "drain-node", f"--address={self.address}", f"--node-id={node.id}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
        command += [f"--deadline-remaining-seconds={seconds}"]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    def _nodes(self) -> list[str]:
        code = f"import ray; ray.init({self.address!r}, logging_level='error')\n"
        code += "print(*[one['NodeID'] for one in ray.nodes() if one['Alive']], sep='\\n')"
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    def launch(self, place: Path, options: list[str], words: list[str]) -> subprocess.Popen[bytes]:
        """Start `onstep launch --ray` in a directory; its output goes to `launch.txt` there."""
        command = [sys.executable, "-m", "onstep", "launch", "--ray", self.address, *options, "--", *words]
        with (place / "launch.txt").open("ab") as output:
            return subprocess.Popen(command, cwd=place, env=self.environment, stdout=output, stderr=output)

    def run(self, place: Path, options: list[str], words: list[str]) -> tuple[int, str]:
        """The exit code and the output of such a launch."""
        process = self.launch(place, options, words)
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
        return process.returncode, (place / "launch.txt").read_text(errors="replace")


@contextmanager
def ray_cluster(cpus: int = 4) -> Iterator[RayCluster]:
    """Start a cluster, and end all of its processes."""
    directory = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # paths of its sockets must be short
    (directory / "token").write_text(secrets.token_hex(32))
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(directory / "token"),
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_agent_register_timeout_ms": "300000",
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")])),
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*RAY, "start", "--head", "--block", f"--port={port}"]
    command += [f"--num-cpus={cpus}", "--include-dashboard=false", f"--temp-dir={directory}/t"]
    command += ["--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    log = directory / "head.txt"
    with log.open("wb") as output:
        head = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        until(
            lambda: b"runtime started" in log.read_bytes(),
            log.read_text,
            while_true=lambda: head.poll() is None,
            seconds=PATIENCE,
        )
        yield RayCluster(directory, port, environment)
    finally:
        _end(directory)
        head.kill()
        head.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _end(directory: Path) -> None:
    """Kill every process of a cluster: all have its directory in their command line or environment."""
    while found := [one for one in psutil.process_iter() if one.pid != os.getpid() and _is_of(one, str(directory))]:
        for one in found:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(found, 10)


def _is_of(process: psutil.Process, directory: str) -> bool:
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.environ().get("RAY_AUTH_TOKEN_PATH", "").startswith(directory)
    return False


class Victims:
    """The ranks of a run that writes its steps, and their ends."""

    def __init__(self, place: Path) -> None:
        self.place, self.seen_in = place, place / "seen"
        self.seen_in.mkdir()
        (place / "writer.py").write_text(WRITER.replace("SEEN", repr(str(self.seen_in))))
        self.words = ["--import", str(place / "writer.py"), "callbacks=[writer:Writer]"]

    def seen(self) -> list[Seen]:
        """The steps of all ranks so far, in order of time."""
        lines = [line for path in self.seen_in.iterdir() for line in path.read_text().split("\n")[:-1]]
        return sorted((Seen(**json.loads(line)) for line in lines), key=lambda one: one.time)

    def living(self, ranks: int) -> dict[int, list[Seen]]:
        """The steps of the ranks that live, by process, once there are as many as wanted."""
        steps: dict[int, list[Seen]] = {}
        for one in self.seen():
            steps.setdefault(one.pid, []).append(one)
        alive = {pid: seen for pid, seen in steps.items() if _lives(pid)}
        return alive if len(alive) == ranks else {}

    def wait_for(self, ranks: int, steps: int, failed: Callable[[], Any], while_true: Callable[[], bool]) -> list[int]:
        """Wait until each of so many ranks has made so many steps since it was started; their processes."""

        def trained() -> list[int]:
            alive = self.living(ranks)
            return sorted(alive) if alive and all(len(seen) >= steps for seen in alive.values()) else []

        return until(trained, failed, while_true=while_true, seconds=PATIENCE)


def _lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill(pid: int) -> None:
    """Kill a process as the kernel does when there is no memory left."""
    os.kill(pid, signal.SIGKILL)
