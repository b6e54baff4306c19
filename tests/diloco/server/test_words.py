"""What a server says of its run, and how a token budget ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onstep.cli.diloco.status import lines
from onstep.diloco.client import DiLoCoClient
from onstep.diloco.codec.body import write_body
from onstep.diloco.protocol.messages import Accepted, Beat, Deregister, Dropped, Heartbeat, Settings
from onstep.diloco.server import DiLoCoServer
from onstep.errors import ConfigError
from tests.diloco.worker.crew import batches, local_worker, new_worker, small_model, train
from tests.support.diloco.raw_worker import RawWorker

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]
TWO = Settings(num_workers=2, min_workers=2, heartbeat_timeout=0.0)


def _submit(one: RawWorker, parameters: Mapping[str, Tensor], loss: float | None, tokens: int) -> None:
    request = replace(one.request(tokens=tokens), loss=loss)
    one.client.send(request, write_body({name: torch.ones_like(tensor) for name, tensor in parameters.items()}))


def test_a_server_says_who_comes_and_goes_and_what_a_round_has(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onstep.diloco.server")
    server = serve(settings=TWO, output_dir=tmp_path, save_every_n_rounds=1)
    a, b = worker(server, "a"), worker(server, "b")
    a.join()
    b.join()
    _submit(a, parameters, 2.0, 300)
    _submit(b, parameters, 4.0, 100)
    a.get(1)
    status = a.client.get_status()
    b.client.send(Deregister("b", b.session))
    said = caplog.messages
    assert "b joined (2 of 2 workers)" in said
    assert "b left (1 of 2 workers)" in said
    assert any(one.startswith("round 1: a 75%, b 25%, loss 2.50000, 400 of 400 tokens, 0.0 MB, ") for one in said)
    shown = "\n".join(lines(status))
    assert "400 tokens, " in shown
    assert "loss: 2.5000 at 400" in shown
    worker(server, "c").join()
    assert "c joined: with the share of the data that b had (2 of 2 workers)" in caplog.messages
    server.stop()
    assert server.model_path == tmp_path / "checkpoints" / "checkpoint-1"
    assert (server.model_path / "model.safetensors").is_file()
    assert f"round 1 saved for other programs: {server.model_path}" in caplog.messages


def test_a_server_names_who_is_missing_in_a_round_and_what_an_operator_did(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onstep.diloco.server")
    server = serve(settings=replace(TWO, min_workers=1, initial_deadline=0.01), output_dir=tmp_path)
    a, b = worker(server, "a"), worker(server, "b")
    a.join()
    b.join()
    _submit(a, parameters, 2.0, 300)
    a.get(1)
    (said,) = [one for one in caplog.messages if one.startswith("round 1: ")]
    assert said.endswith(" s, closed by its deadline without b")
    shown = "\n".join(lines(a.client.get_status()))
    assert "round 2: 0 of 2 submissions are there, waiting for a, b" in shown
    a.client.control("update_optimizer", {"lr": 0.5, "momentum": 0.25})
    a.client.control("update_num_workers", {"num_workers": 3})
    a.client.control("command", {"command": "save-stop"})
    assert caplog.messages[-3:] == [
        "An operator set the outer lr to 0.5, the momentum to 0.25",
        "An operator set the number of expected workers from 2 to 3",
        "An operator orders all workers to save and stop; each does after its next round or heartbeat",
    ]
    a.client.control("command", {"command": "save"})
    assert caplog.messages[-1].startswith("An operator orders all workers to save a checkpoint; ")
    b.client.send(Deregister("b", b.session))
    run_id = server.run_id
    server.stop()
    server = serve(settings=replace(TWO, min_workers=1, initial_deadline=0.01), output_dir=tmp_path)
    assert f"Continuing run {run_id} after round 1 from {tmp_path / 'diloco'}; its workers were: a" in caplog.messages
    shown = "\n".join(lines(worker(server, "a").client.get_status()))
    assert "  b was not there when this server started (0:00:00 ago)" in shown
    assert "  loss from round 5 on: 2.0000 at 10" in lines({"history": [{"version": 5, "loss": 2.0, "tokens": 10}]})


def test_a_spent_token_budget_tells_the_workers_to_save_and_stop_and_ends_the_server(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onstep.diloco.server")
    server = serve(token_budget=500)
    one = worker(server)
    one.join()
    _submit(one, parameters, None, 400)
    one.get(1)
    beat = one.beat()
    assert isinstance(beat, Beat)
    assert beat.commands == ()
    request = replace(one.request(1, 1, tokens=100), loss=None)
    one.client.send(request, write_body({name: torch.ones_like(tensor) for name, tensor in parameters.items()}))
    one.get(2)
    beat = one.beat()
    assert isinstance(beat, Beat)
    assert beat.commands == ("save_and_stop",)
    one.client.send(
        replace(one.request(2, 2, tokens=100), loss=None),
        write_body({name: torch.ones_like(tensor) for name, tensor in parameters.items()}),
    )
    one.get(3)
    assert sum(said.startswith("The token budget is spent (") for said in caplog.messages) == 1
    one.client.send(Deregister("a", one.session))
    server.run()  # returns, as the server ends
    assert server.tokens == 600


def test_who_leaves_says_why_and_what_nobody_has_is_named(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "onstep.diloco.server")
    server = serve(settings=replace(TWO, max_staleness=0, min_workers=1))
    a, b = worker(server, "a"), worker(server, "b")
    a.join()
    b.join()
    _submit(a, parameters, 2.0, 300)
    _submit(b, parameters, 2.0, 300)
    a.get(1)
    assert isinstance(a.submit(parameters, 1, base=1), Accepted)
    assert isinstance(b.submit(parameters, 1, base=1), Accepted)
    a.get(2)
    assert isinstance(b.submit(parameters, 2, base=0), Dropped)
    assert "1 steps of b are lost: too old" in caplog.messages
    b.client.send(Heartbeat("b", b.session, 0.0, 12, lost_steps=4))
    assert "4 steps of b are lost: given up by their worker, since they were too old" in caplog.messages
    a.client.control("kick_worker", {"worker_id": "b"})
    evicted = "b was evicted by an operator; 5 of its steps are in no round, unless it comes back with them"
    assert f"{evicted} (1 of 2 workers)" in caplog.messages
    a.client.send(Deregister("a", a.session, 2, 0, "the run's 2 steps are taken"))
    left = "a left: the run's 2 steps are taken"
    assert f"{left} (0 of 2 workers)" in caplog.messages
    status = a.client.get_status()
    assert status["tokens_per_second"] is status["seconds_to_next_round"] is None
    shown = "\n".join(lines(status))
    assert "602 tokens, no worker has been there for 0:00:00" in shown
    assert f"  {left} (0:00:00 ago)" in shown
    assert f"  {evicted} (0:00:00 ago)" in shown
    assert "next round" not in shown
    assert "lost steps: 1 too old, 4 given up by their worker, since they were too old" in shown
    assert "steps in no round of workers that are gone: 5 of b" in shown
    replaced = worker(server, "b")
    replaced.join()
    assert "5 steps of b are lost: of processes that ended before they submitted them" in caplog.messages
    assert "no worker has been" not in "\n".join(lines(a.client.get_status()))


def test_a_worker_without_heartbeats_stops_with_the_round_that_spends_the_budget(serve: Serve) -> None:
    settings = Settings(sync_every=2, heartbeat_timeout=0.0)
    server = serve(small_model(), settings=settings, token_budget=10, token="s")
    model, optimizer, worker = new_worker(DiLoCoClient(server.address, token="s"))  # type: ignore[arg-type]
    commands: list[str] = []
    with worker:
        for batch in batches(0, 50):
            train(model, optimizer, [batch])
            if commands := worker.take_commands():
                break
    assert commands == ["save_and_stop"]
    assert server.tokens == 10


def test_a_budget_of_no_tokens_is_refused(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="token_budget must be > 0, got 0"):
        serve(token_budget=0)


def test_a_worker_submits_the_mean_loss_over_its_tokens() -> None:
    server, model, optimizer, worker = local_worker()
    worker._optimizer = None
    with worker:
        for (inputs, targets), loss, tokens in zip(batches(0, 2), (1.0, 4.0), (30.0, 10.0), strict=True):
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            worker.end_step(tokens, torch.tensor(loss))
    assert [one.loss for one in server.submits] == [1.75]
