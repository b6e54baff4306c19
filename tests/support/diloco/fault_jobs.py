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

from onstep.diloco.client.membership import Membership
from onstep.diloco.codec.formats import decode_one
from onstep.diloco.codec.specs import digest
from onstep.diloco.outer import nesterov_sgd
from onstep.diloco.protocol.messages import Beat, Settings
from onstep.diloco.protocol.operations import ServerLostError
from onstep.diloco.protocol.rounds import Closed
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.served_run import ServedRun
from onstep.diloco.server.store import Store
from onstep.diloco.worker import DiLoCoWorker
from onstep.diloco.worker.exchange import Exchange, Restored
from onstep.diloco.worker.holdings import Holdings
from onstep.diloco.worker.parameters import Parameters

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
        dn_buffer_size=settings["dn_buffer_size"] or None,
        outer_optimizer_factory=nesterov_sgd,
        output_dir=Path("run"),
        host=settings.get("host", "127.0.0.1"),
        port=0,
        token=TOKEN,
    )
    server.start()
    journal.write(started=server._state.coordinator.versions, port=server.port, time=time.monotonic())
    while not Path(STOP).exists():
        time.sleep(0.02)
    server.stop()
    parameters = [tensor.tolist() for _, tensor in sorted(server.get_global_params().items())]
    lost = dict(server._state.coordinator.losses.steps)
    journal.write(ended=server._state.coordinator.versions, parameters=parameters, lost=lost)


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
            | {"difference": decode_one(one.encoded, spec, one.codec).tolist(), "scale": one.scale}
            for submit, one in zip(submits, contributions, strict=True)
        ]
        journal.write(closing=closed.version, fragment=closed.fragment, contributions=parts, is_mean=closed.is_mean)
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
    worker, model, samples = started
    count = 0
    while not any(path.exists() for path in stops):
        count += 1
        model.step(settings["index"])
        journal.write(step=1, sample=samples.next())
        time.sleep(settings.get("step_seconds", 0.02))
        begun = time.monotonic()
        worker.end_step()
        _note(journal, worker, time.monotonic() - begun)
        if settings["has_checkpoints"] and count % 3 == 0:
            _save(worker, model, samples, Path(f"{name}.checkpoint"), journal, f"{os.getpid()}-{count}")
    worker.merge_in_flight()
    _note(journal, worker, 0.0)
    journal.write(entries=[parameter.tolist() for parameter in model.parameters()])
    worker.stop(merge=False)
    journal.write(left=True)


class Samples:
    """A worker's share of the data, of which each step reads one sample; as `DiLoCoCallback` has it."""

    def __init__(self, worker: DiLoCoWorker, saved: tuple[int, int] | None) -> None:
        self._worker = worker
        self._take(saved)

    @property
    def place(self) -> tuple[int, int]:
        """The share, and the next sample of it."""
        return self._share, self._position

    def next(self) -> tuple[int, int]:
        """The share and the number of the sample that the next step reads."""
        if (self._worker.registered.slot, self._worker.times_over) != (self._share, self._times_over):
            self._take(None)
        self._position += 1
        return self._share, self._position - 1

    def _take(self, saved: tuple[int, int] | None) -> None:
        registered = self._worker.registered
        self._share, self._times_over = registered.slot, self._worker.times_over
        is_same = saved is not None and saved[0] == self._share and self._worker.has_resumed
        self._position = max(saved[1] if saved is not None and is_same else 0, registered.slot_steps)


def _start(settings: dict[str, Any], journal: Journal) -> tuple[DiLoCoWorker, Counters, Samples] | None:
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
    saved, number, place = Path(f"{settings['name']}.checkpoint"), None, None
    if saved.exists():
        state = torch.load(saved)
        number, place = state["number"], state["place"]
        model.load_state_dict(state["model"])
        worker.load_state_dict(state["worker"])
    journal.write(incarnation=os.getpid(), restored=number)
    try:
        worker.start()
    except ServerLostError:
        return None
    return worker, model, Samples(worker, place)


def _save(worker: DiLoCoWorker, model: Counters, samples: Samples, path: Path, journal: Journal, number: str) -> None:
    state = worker.state_dict()
    new = path.with_suffix(".new")
    torch.save({"number": number, "model": model.state_dict(), "worker": state, "place": samples.place}, new)
    journal.write(saving=number, pending=state["exchange"]["session"]["pending"])
    new.replace(path)


def _note(journal: Journal, worker: DiLoCoWorker, waited: float) -> None:
    synchronizer = worker._synchronizer
    assert synchronizer is not None
    assert synchronizer.exchange is not None
    versions = [one.number for one in synchronizer.exchange.fragments]
    digests = [digest(one.base) for one in synchronizer.holdings.fragments]
    journal.write(versions=versions, digests=digests, waited=waited)


def _write_down_exchanges(journal: Journal) -> None:
    """Have the worker tell what it submits before it does, what it merges, what it starts from and what it has said."""
    submit, deliver, beat = Holdings.submit, Exchange.deliver, Membership.beat
    merge, opened, write = Holdings.merge, Holdings.open, Parameters.write
    begun: dict[int, dict[str, Any]] = {}
    written: dict[str, Tensor] = {}

    def residual(self: Holdings, index: int) -> Any:
        names = self.fragments[index].names
        return only({name: one for name, one in self.feedback.residuals.items() if name in names})

    def logged_submit(self: Holdings, index: int, **amount: Any) -> None:
        fragment = self.fragments[index]
        local = only(self.parameters.read(fragment.names))
        begun[index] = {"local": local, "residual_before": residual(self, index)}
        begun[index]["after"] = lambda: residual(self, index)
        submit(self, index, **amount)

    def logged_delivery(self: Exchange, index: int, base: dict[str, Tensor]) -> None:
        line = begun.pop(index, None)
        if line is not None:  # it is encoded, and not sent yet
            one = self.member.session.pending(index)
            assert one is not None
            line |= {"session": one.session, "sequence": one.sequence, "base": one.base_version}
            line |= {"tokens": one.tokens, "steps": one.steps, "residual": line.pop("after")()}
            line |= {"relative_to": self.fragments[index].number}
            journal.write(submitted=index, **line)
        deliver(self, index, base)

    def logged_write(self: Parameters, names: Any, value: Any) -> None:
        def noted(name: str) -> Tensor:
            written[name] = value(name)
            return written[name]

        write(self, names, noted)

    def logged_merge(self: Holdings, index: int, fate: Any, has_moved: bool, local_share: float | None) -> None:
        exchange, names = self.exchange, self.fragments[index].names
        assert exchange is not None
        is_late, is_counted = exchange.fragments[index].is_late, index not in exchange.member.dropped
        now = self.parameters.read(names) if has_moved else {}
        merge(self, index, fate, has_moved, local_share)
        result = {name: written[name] for name in names}
        values = {"now": only(now), "base": only(self.fragments[index].base), "result": only(result)}
        at, is_anew = exchange.fragments[index].number, fate in ("outdated", "given up")
        journal.write(merged=index, at=at, is_counted=is_counted, is_late=is_late, is_anew=is_anew, **values)

    def logged_open(self: Holdings, index: int, state: Any) -> Restored:
        kept = opened(self, index, state)
        assert self.exchange is not None
        base, session = only(self.fragments[index].base), self.exchange.member.session.id
        at, now = self.exchange.fragments[index].number, time.monotonic()
        journal.write(opened=index, at=at, base=base, kept=kept, session=session, time=now)
        return kept

    def logged_beat(self: Membership, steps_per_second: float, bound: float) -> Beat:
        steps, now = self.session.step, time.monotonic()
        answer = beat(self, steps_per_second, bound)
        journal.write(told=steps, time=now)
        return answer

    Holdings.submit, Exchange.deliver = logged_submit, logged_delivery  # type: ignore[method-assign]
    Holdings.merge, Holdings.open = logged_merge, logged_open  # type: ignore[method-assign]
    Parameters.write, Membership.beat = logged_write, logged_beat  # type: ignore[method-assign]
