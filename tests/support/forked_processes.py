"""Processes of a run without the seconds of starting them: a server that has imported everything forks each rank.

Run as a module it is the server: each line of its input is a JSON object, each line of its output a list of numbers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import power
from tests.support.waiting import PATIENCE, until

_IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "multiprocessing.synchronize",
    "numpy.ctypeslib",
    "PIL.ImageOps",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
    "omegaconf",
    "pydantic.main",
    "pydantic.type_adapter",
    "onstep",
    "onstep.callbacks",
    "onstep.trainer",
    "onstep.cli.main",
    "onstep.cli.train",
    "onstep.analysis.plots.plots",
)
"""What a run imports on its way (torch its compiler for the meta device), which takes longer than a small run."""
_SHARED = re.compile(
    r"(onstep|tests\.support)\.(?!as_transformers|exchange|run\b|jobs)(?!.*_jobs\b)"
    r"|(torch\.(distributed|utils)|_?pytest)\b"
)
"""What the server imports once a rank has. Not modules of jobs, which may read their rank when they are imported."""
_PR_SET_PDEATHSIG = 1
_NOT_SHARED = {"accelerate", "datasets", "huggingface_hub", "peft", "transformers"}
"""Packages that read the environment when they are imported, or change what a run does by being imported: a rank that
had to import one shares nothing, as any of its modules may have imported it."""


class Processes:
    """Starts the ranks of a job, and waits for them; ranks are real processes that talk over gloo.

    Args:
        modules: what the server imports beside torch and Onstep.
    """

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, "-m", "tests.support.forked_processes", *modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._asking = threading.Lock()
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def load(self, *modules: str) -> None:
        """Import more in the server, so that no rank has to."""
        assert self._ask({"imports": modules}) == []

    def run(self, jobs: str, job: str, directory: Path, settings: dict[str, Any], *, ranks: int = 1) -> list[int]:
        """Run `job_<job>(settings)` of the module `jobs` in `directory` on each rank; the exit codes, in rank order.

        Where a rank is killed, so are the others, as launchers do. What ranks print goes to `<folder>/rank-<n>.out`,
        what their jobs return to `<folder>/result-<n>.json`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        request = {"jobs": jobs, "job": job, "folder": str(directory), "settings": settings, "ranks": ranks}
        return self._ask(request)

    def results(
        self, jobs: str, job: str, directory: Path, settings: dict[str, Any] | None = None, *, ranks: int = 2
    ) -> list[Any]:
        """What the job returned on each rank, in rank order; all must end well."""
        codes = self.run(jobs, job, directory, settings or {}, ranks=ranks)
        assert codes == [0] * ranks, (codes, output_of(directory))
        return [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(ranks)]

    def start(
        self, jobs: str, job: str, directory: Path, settings: dict[str, Any] | None = None, *, ranks: int = 1
    ) -> list[Child]:
        """Start what `run` runs, each rank as the leader of a process group of its own, and wait for nothing."""
        directory.mkdir(parents=True, exist_ok=True)
        request = {"jobs": jobs, "job": job, "folder": str(directory), "settings": settings or {}, "ranks": ranks}
        pids = self._ask({**request, "goes_on": True})
        assert len(pids) == ranks, pids
        assert all(pid > 1 for pid in pids), pids  # a signal to 0 would reach the tests themselves
        return [Child(pid, self) for pid in pids]

    def exit_codes(self, pid: int) -> list[int]:
        """The exit code of a child that was started; nothing while it lives."""
        return self._ask({"ended": pid})

    def _ask(self, request: dict[str, Any]) -> list[int]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._asking:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            return [int(code) for code in json.loads(self._server.stdout.readline())]

    def close(self) -> None:
        """End the server, which has nothing to finish."""
        self._server.kill()
        self._server.communicate()


@dataclass(frozen=True)
class Child:
    """A rank that was started."""

    pid: int
    processes: Processes

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit code; can be asked for once."""
        words = f"process {self.pid} still lives after {seconds} s"
        return until(lambda: self.processes.exit_codes(self.pid), lambda: words, seconds=seconds)[0]

    @property
    def is_alive(self) -> bool:
        return lives(self.pid)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return _state(self.pid) == "T"

    def end(self) -> None:
        """Kill the process and its group, whatever is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    return _state(pid) not in ("", "Z")


def _state(pid: int) -> str:
    """The system's letter for what a process does; empty if there is none."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""


def output_of(directory: Path) -> str:
    """What all ranks printed, for messages of failed tests."""
    return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(directory.glob("rank-*.out")))


def serve() -> None:
    """Fork the ranks of each request, and answer with their exit codes.

    What imported modules print goes to standard error, as some print: transformers does where W&B is offline.
    """
    end_with_the_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in (*_IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    power.never_cut()
    told, telling = os.pipe()
    os.set_blocking(told, False)
    os.set_blocking(telling, False)
    gc.freeze()  # a child that collects garbage need not copy the memory of what is imported
    for line in sys.stdin:
        request = json.loads(line)
        learned = _read_all(told).split()
        for name in request.get("imports", ()):
            importlib.import_module(name)
        for name in dict.fromkeys(learned):
            with suppress(ImportError):  # the rank may have made it up
                importlib.import_module(name)
        if learned:
            gc.freeze()
        ranks = request.get("ranks", 0)
        with held_port() if ranks > 1 else nullcontext(0) as port:
            children = [_fork(request, rank, port, answers.fileno(), telling) for rank in range(ranks)]
        if "ended" in request:
            answer = list(_ended([request["ended"]]).values())
        else:
            answer = children if request.get("goes_on") else _wait_for(children)
        print(json.dumps(answer), file=answers, flush=True)


def _fork(request: dict[str, Any], rank: int, port: int, answers: int, telling: int) -> int:
    child = os.fork()
    if child:
        return child
    os.close(answers)  # whoever reads them waits for the server only
    code, known = 1, set(sys.modules)
    try:
        code = _be_rank(request, rank, port)
        new = [name for name in sys.modules if name not in known]
        if _NOT_SHARED.isdisjoint(new):
            _tell(telling, [name for name in new if _SHARED.match(name)])
    except BaseException:  # noqa: BLE001 - a rank must never go on as a second server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell(telling: int, names: list[str]) -> None:
    """Write what a rank had to import, as far as there is room."""
    with suppress(BlockingIOError):
        for name in names:
            os.write(telling, f"{name}\n".encode())  # in one piece, as it is shorter than a page


def _read_all(told: int) -> str:
    parts = []
    with suppress(BlockingIOError):
        while part := os.read(told, 1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def _be_rank(request: dict[str, Any], rank: int, port: int) -> int:
    directory = Path(request["folder"])
    os.chdir(directory)
    end_with_the_parent()
    if request.get("goes_on"):
        os.setsid()
    output = os.open(directory / f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["ranks"] > 1:
        size = str(request["ranks"])
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, **address})
    import torch

    torch.set_num_threads(1)
    module = importlib.import_module(request["jobs"])
    try:
        result = getattr(module, f"job_{request['job']}")(request["settings"])
        if result is not None:
            Path(f"result-{rank}.json").write_text(json.dumps(result))
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def end_with_the_parent() -> None:
    """Have Linux kill this process once its parent has ended: killed tests leave no ranks behind that hang."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while len(codes) < len(children):
        codes |= _ended([child for child in children if child not in codes])
        if any(code < 0 for code in codes.values()) or time.monotonic() > deadline:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.003)
    return [codes[child] for child in children]


def _ended(children: list[int]) -> dict[int, int]:
    """The exit codes of those that have ended."""
    found = [os.waitpid(child, os.WNOHANG) for child in children]
    return {child: os.waitstatus_to_exitcode(status) for child, status in found if child}


@contextmanager
def held_port() -> Iterator[int]:
    """A port for rank 0 to listen on, which no connection and no other of these servers takes before.

    It is below those that the system gives to connections. The socket that holds it lives on in forked processes; only
    one that says `SO_REUSEADDR`, as the store of torch does, can be bound beside it.
    """
    with socket.socket() as one:
        while True:
            with suppress(OSError):
                one.bind(("127.0.0.1", random.randrange(10_000, 32_000)))
                break
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: the bind must be refused beside another
        yield one.getsockname()[1]


if __name__ == "__main__":
    serve()
