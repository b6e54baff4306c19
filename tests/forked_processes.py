"""Processes of a run without the seconds of starting them: a server that has imported everything forks each rank.

Run as a script it is the server: each line of its input is a JSON object (see `Processes.run`), each line of its output
the list of the exit codes, in rank order.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_IMPORTED = ("torch", "torch._dynamo", "onstep", "onstep.callbacks", "onstep.trainer", "onstep.cli.train")
"""Building a model on the meta device makes torch import its compiler, which takes longer than a small run."""


class Processes:
    """Starts the ranks of a job, and waits for them; ranks are real processes that talk over gloo.

    Args:
        modules: what the server imports beside torch and Onstep.
    """

    def __init__(self, *modules: str) -> None:
        command = [sys.executable, str(Path(__file__)), *modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, script: Path, job: str, folder: Path, settings: dict[str, Any], *, ranks: int = 1) -> list[int]:
        """Run `job_<job>(settings)` of a script in `folder` on each rank; the exit codes, in rank order.

        Where a rank is killed, so are the others, as launchers do. What ranks print goes to `<folder>/rank-<n>.out`.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        request = {"script": str(script), "job": job, "folder": str(folder), "settings": settings, "ranks": ranks}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return [int(code) for code in json.loads(self._server.stdout.readline())]

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=30)


def output_of(folder: Path) -> str:
    """What all ranks printed, for messages of failed tests."""
    return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(folder.glob("rank-*.out")))


def serve() -> None:
    """Fork the ranks of each request, and answer with their exit codes."""
    for name in (*_IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        port = _free_port()
        children = [_fork(request, rank, port) for rank in range(request["ranks"])]
        print(json.dumps(_wait_for(children)), flush=True)


def _fork(request: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = _be_rank(request, rank, port)
    except BaseException:  # noqa: BLE001 - a rank must never go on as a second server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_rank(request: dict[str, Any], rank: int, port: int) -> int:
    folder, script = Path(request["folder"]), Path(request["script"])
    os.chdir(folder)
    output = os.open(folder / f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request["ranks"] > 1:
        size = str(request["ranks"])
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, **address})
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(script.parent))
    module = importlib.import_module(script.stem)
    try:
        getattr(module, f"job_{request['job']}")(request["settings"])
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def _wait_for(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    deadline = time.monotonic() + 120
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if any(code < 0 for code in codes.values()) or time.monotonic() > deadline:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.003)
    return [codes[child] for child in children]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    serve()
