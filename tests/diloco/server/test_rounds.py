"""Rounds over real sockets: what the server computes, sends and counts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from onstep.diloco.client import DiLoCoClient, RefusedByServerError
from onstep.diloco.codec.formats import decode
from onstep.diloco.codec.specs import digest
from onstep.diloco.protocol.messages import Accepted, NotYet, Refused, Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.sizes import CODECS
from onstep.errors import ConfigError
from tests.support.diloco.raw_worker import RawWorker
from tests.support.waiting import PATIENCE, until

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]
TWO = Settings(num_workers=2, min_workers=2, heartbeat_timeout=0.0)


def _random(parameters: dict[str, Tensor], seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(one.shape, generator=generator, dtype=dtype) for name, one in parameters.items()}


def test_the_outer_step_is_torchs_sgd_on_the_average_weighted_by_tokens(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    model = {name: one.double() for name, one in parameters.items()}
    server = serve(model, settings=TWO)
    workers = [worker(server, name, model) for name in "ab"]
    for one in workers:
        one.join()
    masters = {name: one.clone() for name, one in model.items()}
    optimizer = SGD(masters.values(), lr=0.7, momentum=0.6, nesterov=True)
    for number in range(3):
        deltas = [_random(model, seed, torch.float64) for seed in (number, number + 100)]
        for one, delta, tokens in zip(workers, deltas, (1, 3), strict=True):
            one.submit(delta, number, number, tokens=tokens)
        got = [one.get(number + 1)[1] for one in workers]
        for name, master in masters.items():
            master.grad = (deltas[0][name] + 3 * deltas[1][name]) / 4
        optimizer.step()
        for name, master in masters.items():
            assert torch.allclose(got[0][name], master, rtol=0, atol=1e-10)
            assert torch.equal(got[0][name], got[1][name])


def test_a_round_closes_at_its_deadline_without_another_request(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    server = serve(settings=Settings(num_workers=2, min_workers=1, heartbeat_timeout=0.0, initial_deadline=0.5))
    one = worker(server)
    one.join()
    one.submit(_random(parameters, 0))
    until(lambda: server.sync_round == 1)


@pytest.mark.parametrize("codec", CODECS)
def test_what_updates_add_up_to_has_the_digest_that_full_parameters_have(
    codec: str, serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    server = serve(settings=Settings(codec=codec, heartbeat_timeout=0.0))
    one = worker(server)
    one.join()
    mine = one.get(0)[1]
    for number in range(3):
        one.submit(_random(parameters, number), number, number, codec=codec)
        ready, tensors = one.get(number + 1, have=number)
        if ready.kind == "update":
            decoded = decode(tensors, one.specs, ready.codec)
            mine = {name: mine[name] + decoded[name] for name in mine}
        else:
            mine = tensors
        assert (ready.kind == "update") == (codec != "fp32")
        assert ready.digest == digest(mine)
        full, whole = one.get(number + 1)
        assert (full.kind, full.digest) == ("full", ready.digest)
        assert all(torch.equal(whole[name], mine[name]) for name in mine)


def test_what_a_lossy_codec_loses_of_an_update_is_in_a_later_one(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    factory = lambda some: SGD(some, lr=1.0)  # noqa: E731
    settings = Settings(codec="int4", heartbeat_timeout=0.0)
    server = serve(settings=settings, outer_optimizer_factory=factory)
    one = worker(server)
    one.join()
    delta = {
        name: torch.linspace(-1, 1, max(1, tensor.numel())).view(tensor.shape) for name, tensor in parameters.items()
    }
    one.submit(delta, 0, 0)
    errors = []
    for number in range(1, 8):
        got = one.get(number)[1]
        errors.append(max(float((got[name] - parameters[name] + delta[name]).abs().max()) for name in got))
        one.submit({name: torch.zeros_like(tensor) for name, tensor in delta.items()}, number, number)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-6


def test_a_round_waits_for_the_quorum_and_the_answer_is_held_until_then(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    server = serve(settings=TWO)
    first, second = worker(server, "a"), worker(server, "b")
    for one in (first, second):
        one.join()
    first.submit(_random(parameters, 1))
    assert isinstance(first.ask(1)[0], NotYet)
    versions: list[int] = []
    waiting = threading.Thread(target=lambda: versions.append(first.get(1)[0].version))
    waiting.start()
    second.submit(_random(parameters, 2))
    waiting.join(PATIENCE)
    assert versions == [1]


def test_a_submission_sent_again_counts_once(serve: Serve, worker: Worker, parameters: dict[str, Tensor]) -> None:
    server = serve()
    one = worker(server)
    one.join()
    replies = [one.submit(_random(parameters, 1)) for _ in range(3)]
    one.get(1)
    replies.append(one.submit(_random(parameters, 1)))
    assert replies == [Accepted(1), *[Accepted(1, is_repeat=True)] * 3]
    assert server.sync_round == 1


def test_a_worker_that_is_not_registered_counts_for_nothing(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    server = serve()
    one = worker(server)
    for reply in (one.submit(_random(parameters, 1)), one.ask(0)[0], one.beat()):
        assert isinstance(reply, Refused)
        assert reply.status == 404
    assert server.sync_round == 0


def test_a_wrong_model_is_refused_with_the_first_parameter_that_differs(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    wrong = {**parameters, "blocks.1.weight": torch.zeros(5, 6), "head.bias": torch.zeros(8)}
    reply = worker(serve(), "a", wrong).register()
    assert isinstance(reply, Refused)
    assert reply.status == 422
    assert "blocks.1.weight" in reply.error
    assert "head.bias" not in reply.error


def test_a_worker_may_train_in_bfloat16_what_others_train_in_float32(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    worker(serve(), "a", {name: one.bfloat16() for name, one in parameters.items()}).join()


def test_parameters_in_float32_and_float64_are_averaged_each_in_its_own_dtype(serve: Serve, worker: Worker) -> None:
    model = {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64), "c": torch.ones((), dtype=torch.bfloat16)}
    one = worker(serve(model), "a", model)
    one.join()
    one.submit({"a": torch.ones(3), "b": torch.full((2,), 1e-12, dtype=torch.float64), "c": torch.ones(())})
    got = one.get(1)[1]
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        "a": torch.float32,
        "b": torch.float64,
        "c": torch.float32,
    }
    assert torch.allclose(got["b"] - 1, torch.full((2,), -1.12e-12, dtype=torch.float64), rtol=0, atol=1e-15)


def test_fragments_have_rounds_of_their_own(serve: Serve, worker: Worker, parameters: dict[str, Tensor]) -> None:
    server = serve(settings=Settings(num_fragments=2, heartbeat_timeout=0.0))
    one = worker(server)
    assert one.join().versions == (0, 0)
    names = list(one.get(0, fragment=1)[1])
    one.submit({name: torch.ones_like(parameters[name]) for name in names}, fragment=1)
    assert set(one.get(1, fragment=1)[1]) == set(names) < set(parameters)
    assert isinstance(one.ask(1, fragment=0)[0], NotYet)
    assert server.sync_round == 1


def test_asynchronous_submissions_are_each_a_round_by_delayed_nesterov(
    serve: Serve, worker: Worker, parameters: dict[str, Tensor]
) -> None:
    settings = Settings(mode="async", num_workers=2, min_workers=1, heartbeat_timeout=0.0)
    server = serve(settings=settings, dn_buffer_size=2)
    workers = [worker(server, name) for name in "ab"]
    for one in workers:
        one.join()
    deltas = [_random(parameters, seed) for seed in range(2)]
    for one, delta in zip(workers, deltas, strict=True):
        one.submit(delta)
    got = workers[0].get(2)[1]
    masters = {name: one.clone() for name, one in parameters.items()}
    for name, master in masters.items():
        master.grad = (deltas[0][name] + deltas[1][name]) / 2
    SGD(masters.values(), lr=0.7, momentum=0.6, nesterov=True).step()
    for name, master in masters.items():
        assert torch.allclose(got[name], master, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="dn_buffer_size"):
        serve(settings=TWO, dn_buffer_size=2)


def test_the_simple_client_trains_with_nothing_else(serve: Serve, parameters: dict[str, Tensor]) -> None:
    server = serve(settings=TWO)
    results: dict[str, dict[str, Tensor]] = {}

    def train(worker_id: str) -> None:
        with DiLoCoClient(server.address) as client:
            client.register(worker_id, parameters=parameters)
            ones = {name: torch.ones_like(one) for name, one in parameters.items()}
            results[worker_id] = client.submit_pseudogradients(worker_id, ones, tokens=5)
            assert client.heartbeat(worker_id)["sync_round"] == 1
            client.deregister(worker_id)

    threads = [threading.Thread(target=train, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    for name, one in parameters.items():
        assert torch.allclose(results["a"][name], one - 0.7 * 1.6)
        assert torch.equal(results["a"][name], results["b"][name])
    with DiLoCoClient(server.address) as client:
        status = client.get_status()
        assert (status["num_registered"], status["counts"]["departures"]) == (0, 2)
        assert "deaths" not in status["counts"]
        assert all(torch.equal(one, results["a"][name]) for name, one in client.get_global_params().items())


def test_operators_change_a_running_server(serve: Serve, worker: Worker, parameters: dict[str, Tensor]) -> None:
    server = serve(settings=TWO)
    one = worker(server)
    one.join()
    client = one.client
    assert client.control("update_optimizer", {"lr": 1.0, "momentum": 0.0})["outer_lr"] == 1.0
    assert client.control("update_num_workers", {"num_workers": 3})["num_workers"] == 3
    assert client.get_status()["num_workers"] == 3
    client.control("kick_worker", {"worker_id": "a"})
    assert isinstance(one.beat(), Refused)
    for action, body, status in [
        ("kick_worker", {"worker_id": "a"}, 404),
        ("kick_worker", {}, 400),
        ("update_num_workers", {"num_workers": 1}, 400),
        ("update_optimizer", {"lr": -1}, 400),
        ("update_optimizer", {}, 400),
        ("save_state", {}, 400),
        ("explode", {}, 404),
    ]:
        with pytest.raises(RefusedByServerError) as refused:
            client.control(action, body)
        assert refused.value.status == status
    client.control("shutdown")
    server.run()  # returns, since it was shut down
