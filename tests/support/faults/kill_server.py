"""Lives of a run: real processes of `onstep train`, fresh ones or, in a tenth of the time, forked ones.

Run as a module it is the forking server: it has imported everything, and each line of its input starts a child.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


@dataclass(frozen=True)
class Start:
    """What a life is started with."""

    words: list[str]
    """Arguments of `onstep`."""
    ranks: int
    directory: str
    """Working directory."""
    log: str
    """Where standard output and error are appended."""
    environment: dict[str, str]


class Life:
    """One start of a run: a process, or torchrun's agent with the ranks as its children."""

    def __init__(self, pid: int, ranks: int, process: subprocess.Popen[bytes] | None, server: Server | None) -> None:
        self.pid = pid
        self.ranks = ranks
        self._process = process
        self._server = server
        self._descriptor = os.pidfd_open(pid)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, by itself or otherwise."""
        return has_ended(self._descriptor, 0.0)

    def hold(self, rank: int) -> None:
        """Stop a rank where it is."""
        self._signal(rank, signal.SIGSTOP)
        time.sleep(0.0005)

    def let_go(self, rank: int) -> None:
        """Let a rank go on."""
        self._signal(rank, signal.SIGCONT)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        members = [self.pid] if self.ranks == 1 else children_of(self.pid)
        if len(members) == self.ranks:
            with suppress(ProcessLookupError):
                os.kill(members[rank], number)

    def kill_one(self, rank: int) -> None:
        """SIGKILL for one rank, or for the only process; its data workers are left behind."""
        if self.ranks == 1:
            os.kill(self.pid, signal.SIGKILL)
            return
        members = children_of(self.pid)
        if len(members) == self.ranks:
            os.kill(members[rank], signal.SIGKILL)
        else:  # torchrun has not started the ranks yet
            self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL for everything: agent, ranks and data workers."""
        os.kill(self.pid, signal.SIGSTOP)  # it starts nothing new
        for pid in [*descendants_of(self.pid), self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait(self, seconds: float = 90.0) -> int:
        """The exit code, once the process and the ranks below it are gone; what a torchrun agent waits for is over.

        Raises:
            TimeoutError: when something still lives.
        """
        members = [(pid, _opened(pid)) for pid in children_of(self.pid)] if self.ranks > 1 else []
        for pid, descriptor in [(self.pid, self._descriptor), *members]:
            if descriptor is not None:
                if not has_ended(descriptor, seconds):
                    raise TimeoutError(f"process {pid} still lives after {seconds} s")
                os.close(descriptor)
        if self._process is not None:
            return self._process.wait()
        assert self._server is not None
        return self._server.exit_code(self.pid)


class Server:
    """Starts lives."""

    def __init__(self, has_fork: bool = True) -> None:
        self._server = None
        if has_fork:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.faults.kill_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )

    def fork(self, start: Start) -> Life:
        """A child of the server, which has imported everything."""
        return Life(self._ask({"start": asdict(start)}), start.ranks, None, self)

    def fresh(self, start: Start) -> Life:
        """A process that starts from nothing, as a user starts it."""
        launcher = [*TORCHRUN, f"--nproc-per-node={start.ranks}"] if start.ranks > 1 else []
        with Path(start.log).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "onstep", *start.words],
                cwd=start.directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", **start.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return Life(process.pid, start.ranks, process, None)

    def exit_code(self, pid: int) -> int:
        """Reap a child."""
        return self._ask({"wait": pid})

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.communicate(timeout=60)

    def _ask(self, request: dict[str, object]) -> int:
        assert self._server is not None
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def has_ended(descriptor: int, seconds: float) -> bool:
    """Whether the process of a pidfd ends within some seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def children_of(parent: int) -> list[int]:
    """The processes that a process has started, oldest first."""
    found = [(started, pid) for pid, of, started in _processes() if of == parent]
    return [pid for _, pid in sorted(found)]


def descendants_of(parent: int) -> list[int]:
    """All processes below a process."""
    below, known = [parent], _processes()
    for one in below:
        below += [pid for pid, of, _ in known if of == one]
    return below[1:]


def _processes() -> list[tuple[int, int, int]]:
    """Process, its parent, when it started."""
    found = []
    for directory in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            found.append((int(directory.name), int(fields[1]), int(fields[19])))
    return found


def _opened(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid)
    return None


def serve() -> None:
    """Fork a child for each start; answer each wait with the exit code."""
    import omegaconf  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.run

    import onstep.callbacks
    import onstep.cli.train
    import onstep.training  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if child == 0:
            os._exit(_live(Start(**request["start"])))
        print(child, flush=True)


def _live(start: Start) -> int:
    """What a forked child does: the same as `onstep` or `torchrun -m onstep`."""
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.setsid()
    os.chdir(start.directory)
    os.environ.update(start.environment)
    if start.ranks == 1:
        return _onstep(start.words)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=start.ranks,
        run_id=str(time.time_ns()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
    )
    try:
        elastic_launch(config, _rank)(start.words)
    except ChildFailedError as error:
        print(error.format_msg(), file=sys.stderr, flush=True)
        return 1
    return 0


def _rank(words: list[str]) -> None:
    code = _onstep(words)
    if code:
        sys.exit(code)


def _onstep(words: list[str]) -> int:
    from onstep.cli.main import main

    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    serve()
