"""A server and workers as processes that write down what they do, line by line, so that SIGKILL loses none of it.

The model is a vector with one entry for each worker. A step of worker `i` adds 1 to entry `i` and nothing else, so that
the committed differences tell how many steps of each worker have been counted.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onstep.diloco.codec import digest
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.served_run import ServedRun
from onstep.diloco.server.store import Store
from onstep.diloco.worker import DiLoCoWorker
from onstep.diloco.worker.exchange import ServerUnreachableError

TOKEN = "secret"
STOP = "stop"
"""A file that ends the processes of its directory."""


class Counters(nn.Module):
    """The model."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.zeros(size, dtype=torch.float64))


class Journal:
    """Lines of JSON, each written at once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **values: object) -> None:
        os.write(self._file, (json.dumps(values) + "\n").encode())


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def job_server(settings: dict[str, Any]) -> None:
    """Serve until the directory has the file `stop`; `mark` kills or stops the process at a point of a commit."""
    journal = Journal(Path("server.jsonl"))
    _write_down_rounds(journal, settings.get("mark"), settings.get("signal"))
    count = settings["num_workers"]
    run = Settings(
        num_workers=count,
        min_workers=settings["min_workers"],
        sync_every=2,
        heartbeat_timeout=settings.get("heartbeat_timeout", 2.0),
        initial_deadline=1.0,
    )
    host = settings.get("host", "127.0.0.1")
    server = DiLoCoServer(Counters(count), settings=run, output_dir=Path("run"), host=host, port=0, token=TOKEN)
    server.start()
    journal.write(started=server.sync_round, port=server.port)
    while not Path(STOP).exists():
        time.sleep(0.02)
    server.stop()
    journal.write(ended=server.sync_round, parameters=server.get_global_params()["entries"].tolist())


def _write_down_rounds(journal: Journal, mark: str | None, number: int | None) -> None:
    """Have the server tell what it commits.

    This patches three methods of the server, in its own process: nobody else needs to know a round's tensors, or to
    interrupt a commit half-way.
    """
    take, commit, save = ServedRun._take, Store.commit, Store.save

    def reached(name: str, version: int) -> None:
        if name == mark and version == 3 and not Path("marked").exists():
            Path("marked").touch()
            os.kill(os.getpid(), number or signal.SIGKILL)

    def logged_take(self: ServedRun, closed: Closed) -> Any:
        contributions = take(self, closed)
        submits = sorted((one.submit for one in closed.contributions), key=lambda one: (one.worker_id, one.sequence))
        parts = [
            {"worker": submit.worker_id, "sequence": submit.sequence, "weight": one.weight}
            | {"difference": one.encoded["entries"].tolist()}
            for submit, one in zip(submits, contributions, strict=True)
        ]
        journal.write(closing=closed.version, contributions=parts)
        return contributions

    def logged_commit(self: Store, fragment: int, version: int, state: Any, rest: Any) -> None:
        reached("closed", version)
        self.__dict__["committing"] = version
        commit(self, fragment, version, state, rest)
        del self.__dict__["committing"]
        reached("persisted", version)
        journal.write(persisted=version)

    def logged_save(self: Store, rest: Any) -> None:
        if version := self.__dict__.get("committing"):
            reached("written", version)
        save(self, rest)

    ServedRun._take, Store.commit, Store.save = logged_take, logged_commit, logged_save  # type: ignore[method-assign]


def enter(namespace: str) -> None:
    """Continue in a network namespace; `os.setns` exists since Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def job_worker(settings: dict[str, Any]) -> None:
    """Train until the directory has the file `stop`."""
    if "namespace" in settings:
        enter(settings["namespace"])
    index, name = settings["index"], settings["name"]
    journal = Journal(Path(f"{name}.jsonl"))
    model = Counters(settings["num_workers"])
    worker = DiLoCoWorker(
        model,
        None,
        settings["address"],
        worker_id=name,
        timeout=settings["bound"],
        heartbeat_interval=0.2,
        max_sync_retries=1,
        auth_token=TOKEN,
    )
    while not _started(worker):
        if Path(STOP).exists():
            return
    journal.write(incarnation=os.getpid())
    while not Path(STOP).exists():
        with torch.no_grad():
            model.entries[index] += 1.0
        journal.write(step=1)
        time.sleep(settings.get("step_seconds", 0.02))
        started = time.monotonic()
        worker.end_step()
        _note(journal, worker, time.monotonic() - started)
    worker.settle()
    _note(journal, worker, 0.0)
    exchange = worker._work.exchange  # type: ignore[union-attr]
    (fragment,) = exchange.fragments  # type: ignore[union-attr]
    pending = exchange.session.pending(0)  # type: ignore[union-attr]
    progress = (model.entries.detach() - fragment.base["entries"])[index].item()
    journal.write(progress=progress, pending=None if pending is None else pending.sequence)
    worker.stop(merge=False)
    journal.write(left=True)


def _started(worker: DiLoCoWorker) -> bool:
    try:
        worker.start()
    except ServerUnreachableError:
        return False
    return True


def _note(journal: Journal, worker: DiLoCoWorker, waited: float) -> None:
    (fragment,) = worker._work.exchange.fragments  # type: ignore[union-attr]
    metrics = worker.sync_metrics
    journal.write(version=fragment.version, digest=digest(fragment.base), waited=waited, metrics=metrics)
