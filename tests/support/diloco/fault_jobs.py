"""A server and workers as processes that write down what they do, line by line, so that SIGKILL loses none of it.

Each part of the model is a fragment if the run streams, and has a row for each worker. A step of worker `i` adds `STEP`
to row `i` of every part and nothing else, so that committed differences tell how many steps of whom they have.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onstep.diloco.codec.formats import decode_one
from onstep.diloco.codec.specs import digest
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.protocol.session import ServerLostError
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.served_run import ServedRun
from onstep.diloco.server.store import Store
from onstep.diloco.worker import DiLoCoWorker
from onstep.diloco.worker.exchange import Exchange

TOKEN = "secret"
STOP = "stop"
"""A file that ends the processes of its directory; `leave-<pid>` ends one worker."""
STEP = torch.tensor([1.0, 0.3, 0.07], dtype=torch.float64)
"""What a codec of 8 bits cannot represent exactly."""


class Counters(nn.Module):
    """The model: `parts.<n>.entries`, each a row of three for every worker."""

    def __init__(self, num_workers: int, num_parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Module() for _ in range(num_parts))
        for part in self.parts:
            part.entries = nn.Parameter(torch.zeros(num_workers, len(STEP), dtype=torch.float64))

    @torch.no_grad()
    def step(self, index: int) -> None:
        """A worker's training step."""
        for parameter in self.parameters():
            parameter[index] += STEP


class Journal:
    """Lines of JSON, each written at once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, b"\n")  # where another process was killed while it wrote

    def write(self, **values: object) -> None:
        os.write(self._file, (json.dumps(values) + "\n").encode())


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal, without one that is being written, or during which its writer was killed."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def only(tensors: Mapping[str, Tensor]) -> Any:
    """The values of the one parameter of a fragment; None if there is none."""
    return next((tensor.tolist() for tensor in tensors.values()), None)


def job_server(settings: dict[str, Any]) -> None:
    """Serve until the directory has the file `stop`; `mark` kills or stops the process at a point of a commit."""
    journal = Journal(Path("server.jsonl"))
    _write_down_rounds(journal, settings.get("mark"), settings.get("signal"))
    run = Settings(heartbeat_timeout=2.0, initial_deadline=1.0, **settings["run"])
    server = DiLoCoServer(
        Counters(run.num_workers, run.num_fragments),
        settings=run,
        dn_buffer_size=settings["dn_buffer_size"],
        output_dir=Path("run"),
        host=settings.get("host", "127.0.0.1"),
        port=0,
        token=TOKEN,
    )
    server.start()
    journal.write(started=server._state.coordinator.versions, port=server.port)
    while not Path(STOP).exists():
        time.sleep(0.02)
    server.stop()
    parameters = [tensor.tolist() for _, tensor in sorted(server.get_global_params().items())]
    journal.write(ended=server._state.coordinator.versions, parameters=parameters)


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
        (spec,) = self.fragments[closed.fragment].specs
        parts = [
            {"worker": submit.worker_id, "session": submit.session, "sequence": submit.sequence, "weight": one.weight}
            | {"base": submit.base_version, "tokens": submit.tokens, "steps": submit.steps}
            | {"difference": decode_one(one.encoded, spec, one.codec).tolist()}
            for submit, one in zip(submits, contributions, strict=True)
        ]
        journal.write(closing=closed.version, fragment=closed.fragment, contributions=parts)
        return contributions

    def logged_commit(self: Store, fragment: int, version: int, state: Any, rest: Any) -> None:
        if version == 0:  # what the run starts with
            commit(self, fragment, version, state, rest)
            return
        masters, parameters = only(state["masters"]), only(state["broadcast"] or state["masters"])
        tensors = {"masters": masters, "parameters": parameters, "digest": state["digest"]}
        journal.write(writing=version, fragment=fragment, **tensors)
        reached("closed", version)
        self.__dict__["committing"] = version
        commit(self, fragment, version, state, rest)
        del self.__dict__["committing"]
        reached("persisted", version)
        journal.write(persisted=version, fragment=fragment)

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
    """Train until the directory has the file `stop` or `leave-<pid>`; from the newest checkpoint, if any is made."""
    if "namespace" in settings:
        enter(settings["namespace"])
    name, stops = settings["name"], (Path(STOP), Path(f"leave-{os.getpid()}"))
    journal = Journal(Path(f"{name}.jsonl"))
    _write_down_exchanges(journal)
    started = None
    while started is None:
        if any(path.exists() for path in stops):
            return
        started = _start(settings, journal)
    worker, model = started
    count = 0
    while not any(path.exists() for path in stops):
        count += 1
        model.step(settings["index"])
        journal.write(step=1)
        time.sleep(settings.get("step_seconds", 0.02))
        begun = time.monotonic()
        worker.end_step()
        _note(journal, worker, time.monotonic() - begun)
        if settings["has_checkpoints"] and count % 3 == 0:
            _save(worker, model, Path(f"{name}.checkpoint"), journal, f"{os.getpid()}-{count}")
    worker.merge_in_flight()
    _note(journal, worker, 0.0)
    journal.write(entries=[parameter.tolist() for parameter in model.parameters()])
    worker.stop(merge=False)
    journal.write(left=True)


def _start(settings: dict[str, Any], journal: Journal) -> tuple[DiLoCoWorker, Counters] | None:
    """A worker that has joined, as a program makes it when it is started; None if the server does not answer."""
    model = Counters(settings["num_workers"], settings["num_fragments"])
    worker = DiLoCoWorker(
        model,
        None,
        settings["address"],
        worker_id=settings["name"],
        timeout=settings["bound"],
        heartbeat_interval=0.2,
        max_sync_retries=1,
        auth_token=TOKEN,
    )
    saved, number = Path(f"{settings['name']}.checkpoint"), None
    if saved.exists():
        state = torch.load(saved)
        number = state["number"]
        model.load_state_dict(state["model"])
        worker.load_state_dict(state["worker"])
    journal.write(incarnation=os.getpid(), restored=number)
    try:
        worker.start()
    except ServerLostError:
        return None
    return worker, model


def _save(worker: DiLoCoWorker, model: Counters, path: Path, journal: Journal, number: str) -> None:
    state = worker.state_dict()
    new = path.with_suffix(".new")
    torch.save({"number": number, "model": model.state_dict(), "worker": state}, new)
    journal.write(saving=number, pending=state["exchange"]["session"]["pending"])
    new.replace(path)


def _note(journal: Journal, worker: DiLoCoWorker, waited: float) -> None:
    bases = [one.base for one in worker._synchronizer.exchange.fragments]  # type: ignore[union-attr]
    versions, digests = [one.number for one in bases], [digest(one.parameters) for one in bases]
    journal.write(versions=versions, digests=digests, waited=waited)


def _write_down_exchanges(journal: Journal) -> None:
    """Have the worker tell what it submits before it does, what it merges, and what it starts from."""
    submit, deliver = Exchange.submit, Exchange.deliver
    merge, opened = Exchange.merge, Exchange.open

    def residual(self: Exchange, index: int) -> Any:
        names = self.fragments[index].names
        return only({name: one for name, one in self.feedback.residuals.items() if name in names})

    def logged_submit(self: Exchange, index: int, local: dict[str, Tensor], **amount: Any) -> None:
        self.__dict__["begun"] = {"local": only(local), "residual_before": residual(self, index)}
        submit(self, index, local, **amount)

    def logged_delivery(self: Exchange, index: int) -> None:
        begun = self.__dict__.pop("begun", None)
        if begun is not None:  # it is encoded, and not sent yet
            one = self.member.session.pending(index)
            assert one is not None
            begun |= {"session": one.session, "sequence": one.sequence, "base": one.base_version}
            begun |= {"tokens": one.tokens, "steps": one.steps, "residual": residual(self, index)}
            journal.write(submitted=index, **begun)
        deliver(self, index)

    def logged_merge(self: Exchange, index: int, now: Any, local_share: float | None) -> Any:
        version, is_late = self._arrived[index], self.fragments[index].is_late
        is_counted = index not in self.member.dropped
        result = merge(self, index, now, local_share)
        values = {"now": only(now), "base": only(version.parameters), "result": only(result)}
        journal.write(merged=index, at=version.number, is_counted=is_counted, is_late=is_late, **values)
        return result

    def logged_open(self: Exchange, index: int, state: Any) -> bool:
        is_kept = opened(self, index, state)
        base = self.fragments[index].base
        journal.write(opened=index, at=base.number, base=only(base.parameters), is_kept=is_kept)
        return is_kept

    Exchange.submit, Exchange.deliver = logged_submit, logged_delivery  # type: ignore[method-assign,assignment]
    Exchange.merge, Exchange.open = logged_merge, logged_open  # type: ignore[method-assign]
