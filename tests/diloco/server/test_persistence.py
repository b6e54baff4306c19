"""What is left after a crash: the last committed round, exactly, and nothing of what was not committed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from onstep.checkpoint import read_tensors
from onstep.diloco.client import DiLoCoClient, RefusedByServerError
from onstep.diloco.codec.specs import digest
from onstep.diloco.protocol.messages import Accepted, NotYet, Refused, Settings
from onstep.diloco.server import DiLoCoServer, served_run
from onstep.diloco.server import server as server_module
from onstep.diloco.server.store import Store
from onstep.errors import CheckpointError, ConfigError, RunExistsError
from tests.support.diloco.raw_worker import RawWorker
from tests.support.forked_processes import Processes
from tests.support.waiting import PATIENCE

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]
ONE = Settings(heartbeat_timeout=0.0)


def _delta(parameters: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(one.shape, generator=generator) for name, one in parameters.items()}


@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize("optimizer", [None, lambda some: Adam(some, lr=0.1)], ids=["nesterov", "adam"])
def test_a_server_that_restarts_after_every_round_computes_what_one_that_never_stops_does(
    codec: str, optimizer: Any, serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    options = {"settings": Settings(codec=codec, heartbeat_timeout=0.0), "outer_optimizer_factory": optimizer}
    through = serve(**options)
    steady = worker(through)
    steady.join()
    run_ids = set()
    for number in range(3):
        delta = _delta(parameters, number)
        steady.submit(delta, number, number)
        server = serve(output_dir=tmp_path, **options)
        run_ids.add(server.run_id)
        one = worker(server)
        assert one.join().versions == (number,)
        one.submit(delta, number, number)
        assert one.get(number + 1)[0].digest == steady.get(number + 1)[0].digest
        server.stop()
    assert len(run_ids) == 1


def test_what_was_counted_before_a_crash_is_not_counted_again_after_it(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    server = serve(output_dir=tmp_path)
    one = worker(server)
    one.join()
    one.submit(_delta(parameters, 1))
    before = one.get(1)[0].digest
    server.stop()
    again = worker(serve(output_dir=tmp_path))
    again.session = one.session
    assert again.join().next_sequences == (1,)
    assert again.submit(_delta(parameters, 1)) == Accepted(1, is_repeat=True)
    assert again.get(1)[0].digest == before


def test_the_roster_survives_so_that_nobody_gets_the_share_of_another(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    settings = Settings(num_workers=3, min_workers=2, heartbeat_timeout=0.0)
    server = serve(settings=settings, output_dir=tmp_path)
    slots = {name: worker(server, name).join().slot for name in "abc"}
    state = json.loads((tmp_path / "diloco" / "server.json").read_text())
    server.stop()
    server = serve(settings=settings, output_dir=tmp_path)
    assert {name: worker(server, name).join().slot for name in "cba"} == slots
    assert len(set(slots.values())) == 3
    assert "a" in json.dumps(state["rest"]["roster"])


class Saving:
    """Holds up the saving of the first round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_go_on = threading.Event(), threading.Event()
        commit = Store.commit

        def slow(store: Store, fragment: int, version: int, *rest: Any) -> None:
            if version == 1:
                self.began.set()
                assert self.may_go_on.wait(PATIENCE)
            commit(store, fragment, version, *rest)

        monkeypatch.setattr(Store, "commit", slow)


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Saving:
    return Saving(monkeypatch)


def test_a_round_is_on_disk_before_any_worker_sees_it(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path, saving: Saving
) -> None:
    one = worker(serve(output_dir=tmp_path))
    one.join()
    one.submit(_delta(parameters, 1))
    assert saving.began.wait(PATIENCE)
    assert isinstance(one.ask(1)[0], NotYet)
    saving.may_go_on.set()
    assert one.get(1)[0].version == 1


def test_stop_waits_for_the_round_that_is_being_saved(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path, saving: Saving
) -> None:
    server = serve(output_dir=tmp_path)
    one = worker(server)
    one.join()
    one.submit(_delta(parameters, 1))
    assert saving.began.wait(PATIENCE)
    threading.Timer(0.5, saving.may_go_on.set).start()
    server.stop()
    assert server.sync_round == 1
    saved = read_tensors(tmp_path / "checkpoints" / "checkpoint-1" / "model.safetensors")
    assert digest(saved) == digest(server.get_global_params())


def test_the_directory_is_locked_until_the_last_byte_of_a_round_is_written_however_long_that_takes(
    worker: Worker,
    parameters: dict[str, Tensor],
    tmp_path: Path,
    saving: Saving,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(server_module, "STOP_SECONDS", 0.05)
    options: dict[str, Any] = {"port": 0, "output_dir": tmp_path, "settings": ONE}
    server = DiLoCoServer(parameters, **options)
    server.start()
    one = worker(server)
    one.join()
    one.submit(_delta(parameters, 1))
    assert saving.began.wait(PATIENCE)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    while caplog.text.count("being saved") < 2 and stopping.is_alive():
        time.sleep(0.01)
    with pytest.raises(RunExistsError):
        DiLoCoServer(parameters, **options)
    saving.may_go_on.set()
    stopping.join()
    again = DiLoCoServer(parameters, **options)
    again.stop()
    assert again.sync_round == 1


def test_a_full_disk_holds_the_round_back_and_not_the_workers(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_run, "RETRY_SECONDS", 0.05)
    has_room = threading.Event()
    commit = Store.commit

    def full(self: Store, *given: Any) -> None:
        if not has_room.is_set():
            raise CheckpointError("write of 7 bytes failed: No space left on device")
        commit(self, *given)

    server = serve(output_dir=tmp_path)
    one = worker(server)
    one.join()
    monkeypatch.setattr(Store, "commit", full)
    one.submit(_delta(parameters, 1))
    while "No space" not in str(one.client.get_status()["disk_error"]):
        pass
    assert isinstance(one.ask(1)[0], NotYet)
    assert not isinstance(one.beat(), Refused)
    has_room.set()
    assert one.get(1)[0].version == 1
    assert one.client.get_status()["disk_error"] is None


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda there: _damage(next(there.glob("fragment-*"))), "BLAKE3"),
        (lambda there: next(there.glob("fragment-*")).unlink(), "missing"),
        (lambda there: (there / "server.json").write_text("{"), "server.json"),
        (lambda there: (there / "server.json").write_text('{"format": 99}'), "format"),
        (lambda there: (there / "server.json").write_text("[" * 100_000), "server.json"),
    ],
    ids=["changed tensors", "no tensors", "half a file", "a later format", "nested"],
)
def test_a_damaged_state_is_refused_by_name(
    spoil: Callable[[Path], object], error: str, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    DiLoCoServer(parameters, port=0, output_dir=tmp_path).stop()
    spoil(tmp_path / "diloco")
    with pytest.raises(CheckpointError, match=error):
        DiLoCoServer(parameters, port=0, output_dir=tmp_path)


def test_the_state_of_another_model_is_refused(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    DiLoCoServer(parameters, port=0, output_dir=tmp_path).stop()
    with pytest.raises((CheckpointError, ConfigError), match="model"):
        DiLoCoServer({"other": torch.zeros(3)}, port=0, output_dir=tmp_path)


def test_two_servers_never_share_a_directory(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    first = DiLoCoServer(parameters, port=0, output_dir=tmp_path)
    with pytest.raises(RunExistsError, match="in use"):
        DiLoCoServer(parameters, port=0, output_dir=tmp_path)
    first.stop()
    DiLoCoServer(parameters, port=0, output_dir=tmp_path).stop()


def test_what_a_crash_left_half_written_is_removed(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    DiLoCoServer(parameters, port=0, output_dir=tmp_path).stop()
    there = tmp_path / "diloco"
    (there / "fragment-0-version-1.safetensors").write_bytes(b"half")
    (there / "notes.txt").write_text("mine")
    DiLoCoServer(parameters, port=0, output_dir=tmp_path).stop()
    assert sorted(one.name for one in there.iterdir()) == [
        "fragment-0-version-0.safetensors",
        "lock",
        "notes.txt",
        "server.json",
    ]


def test_checkpoints_for_other_programs_are_kept_up_to_the_limit(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    server = serve(output_dir=tmp_path, save_every_n_rounds=1, save_total_limit=2)
    one = worker(server)
    one.join()
    for number in range(4):
        one.submit(_delta(parameters, number), number, number)
        one.get(number + 1)
    assert one.client.control("save_state")["sync_round"] == 4
    server.stop()
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("checkpoint-*"))
    assert names == ["checkpoint-3", "checkpoint-4"]
    resumed = DiLoCoServer(tmp_path / "checkpoints", port=0, output_dir=tmp_path / "other")
    assert digest(resumed.get_global_params()) == digest(server.get_global_params())
    resumed.stop()


def test_checkpoints_of_another_run_are_left_alone(serve: Serve, worker: Worker, tmp_path: Path) -> None:
    def save() -> None:
        server = serve(output_dir=tmp_path)
        one = worker(server)
        one.join()
        one.client.control("save_state")
        server.stop()

    save()
    theirs = tmp_path / "checkpoints" / "checkpoint-0"
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    shutil.rmtree(tmp_path / "diloco")  # what remains is a directory of checkpoints that this server has not written
    save()
    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before
    assert (tmp_path / "diloco" / "checkpoints" / "checkpoint-0").is_dir()


def test_save_state_and_load_state_carry_a_run_to_another_place(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    server = serve()
    one = worker(server)
    one.join()
    one.submit(_delta(parameters, 1))
    one.get(1)
    with pytest.raises(RuntimeError, match="stop it first"):
        server.save_state(tmp_path)
    server.stop()
    server.save_state(tmp_path)
    other = DiLoCoServer(parameters, port=0, settings=ONE)
    other.load_state(tmp_path)
    assert (other.run_id, other.sync_round) == (server.run_id, 1)
    assert digest(other.get_global_params()) == digest(server.get_global_params())
    with pytest.raises(CheckpointError, match="no state"):
        other.load_state(tmp_path / "nothing")
    other.stop()


_PROGRAM = """
import torch
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
parameters = {"weight": torch.arange(200_000.0)}
settings = Settings(codec="int8", heartbeat_timeout=0.0)
server = DiLoCoServer(parameters, port=0, output_dir="out", settings=settings)
open("address", "w").write(server.address)
server.run()
"""


def test_no_committed_round_is_lost_to_sigkill(processes: Processes, tmp_path: Path) -> None:
    # The server is killed at any instant of ten rounds; the worker repeats what was not answered.
    processes.load("onstep.diloco.server.serving.app", "uvicorn", "httpx")
    parameters = {"weight": torch.arange(200_000.0)}
    address, script = tmp_path / "address", tmp_path / "server.py"
    script.write_text(_PROGRAM)
    os.mkfifo(address)
    digests: dict[int, str] = {}
    sent = 0
    for life in range(4):
        (process,) = processes.start("tests.support.jobs.script_jobs", "script", tmp_path, {"script": str(script)})
        try:
            with DiLoCoClient(address.read_text(), timeout=200.0, max_retries=0) as client:
                one = RawWorker(client, "a", parameters)
                joined = one.join()
                newest, (sequence,) = joined.versions[0], joined.next_sequences
                assert newest >= max(digests, default=0)
                if newest in digests:
                    assert one.get(newest)[0].digest == digests[newest]
                assert sequence == newest  # each counted once
                for answers in itertools.count():
                    if answers == life:  # the next is killed at some instant of its round
                        threading.Timer(0.002 * life, os.kill, (process.pid, signal.SIGKILL)).start()
                    one.submit({"weight": torch.full((200_000,), float(newest))}, newest, newest)
                    sent += 1
                    ready = one.get(newest + 1)[0]
                    newest = ready.version
                    digests[newest] = ready.digest
        except ConnectionError:
            pass
        finally:
            process.end()
            process.wait()
    print(f"{sent} submissions, {max(digests)} rounds committed, 4 kills")
    assert len(digests) >= 3


def test_a_refusal_is_an_error_with_its_status(serve: Serve, parameters: dict[str, Tensor]) -> None:
    with DiLoCoClient(serve().address, max_retries=0) as client, pytest.raises(RefusedByServerError) as refused:
        client.heartbeat("nobody")
    assert refused.value.status == 404
