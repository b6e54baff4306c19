"""What a user's loop submits by `DiLoCoClient` counts once, or the caller is told, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.diloco.client import DiLoCoClient, RefusedByServerError, ServerLostError, SubmissionDroppedError
from onstep.diloco.client.connection import Body, Connection
from onstep.diloco.codec.specs import InvalidTensorsError
from onstep.diloco.protocol.messages import Ready, Reply, Request, Settings
from onstep.diloco.server import DiLoCoServer
from onstep.errors import ConfigError
from tests.diloco.worker.crew import in_threads, sgd
from tests.support.waiting import PATIENCE, until

TWO = {"num_workers": 2, "min_workers": 2, "heartbeat_timeout": 0.0}


def model() -> dict[str, Tensor]:
    return {"layers.0.weight": torch.zeros(3), "layers.1.weight": torch.zeros(2, 2)}


def differences(value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(one, value) for name, one in model().items()}


def is_all(parameters: dict[str, Tensor], value: float) -> bool:
    return bool(parameters) and all(torch.equal(one, torch.full_like(one, value)) for one in parameters.values())


def serve(**options: Any) -> DiLoCoServer:
    made: dict[str, Any] = {"outer_optimizer_factory": sgd, "port": 0, "token": "secret"}
    given = {name: options.pop(name) for name in ("output_dir", "port") if name in options}
    return DiLoCoServer(model(), settings=Settings(**options), **(made | given))


@pytest.fixture
def connect() -> Iterator[Callable[..., DiLoCoClient]]:
    """Makes clients of workers that have registered."""
    clients: list[DiLoCoClient] = []

    def make(server: DiLoCoServer, worker_id: str, **options: Any) -> Any:
        options = {"timeout": 20.0, "max_retries": 5, "retry_delay": 0.1, "token": "secret"} | options
        clients.append(DiLoCoClient(server.address, **options))
        clients[-1].register(worker_id, parameters=model())
        return clients[-1]

    yield make
    for one in clients:
        one.close()


Connect = Callable[..., Any]


@contextmanager
def short(client: DiLoCoClient) -> Iterator[None]:
    """Calls that give up what another worker has to come for."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client, "timeout", 0.3)
        yield


def arrived(client: DiLoCoClient) -> list[str]:
    found: list[str] = client.get_status()["rounds"][0]["arrived"]
    return found


def test_a_submission_that_a_killed_server_had_accepted_is_sent_again(connect: Connect, tmp_path: Path) -> None:
    first = serve(output_dir=tmp_path, **TWO)
    first.start()
    one, two = connect(first, "a"), connect(first, "b")

    def submit_later() -> Any:
        until(lambda: arrived(two) == ["a"])
        first.stop()
        with serve(output_dir=tmp_path, port=first.port, **TWO) as second:
            result = two.submit_pseudogradients("b", differences(2.0))
            ended.wait(PATIENCE)
            assert two.get_status()["counts"]["contributions"] == 2
            assert second.sync_round == 1
            return result

    def submit() -> Any:
        try:
            return one.submit_pseudogradients("a", differences(1.0))
        finally:
            ended.set()

    ended = threading.Event()
    results = in_threads(lambda index: (submit, submit_later)[index](), 2)
    assert all(is_all(one, -1.5) for one in results)


def test_the_same_call_after_a_timeout_goes_on_with_the_submission(connect: Connect) -> None:
    with serve(**TWO) as server:
        one, two = connect(server, "a"), connect(server, "b")
        with short(one):
            for _ in range(2):
                with pytest.raises(ServerLostError, match="the same call again continues it"):
                    one.submit_pseudogradients("a", differences(1.0))
        with pytest.raises(ConfigError, match="call again with exactly its pseudo-gradients"):
            one.submit_pseudogradients("a", differences(3.0))
        assert is_all(two.submit_pseudogradients("b", differences(2.0)), -1.5)
        assert is_all(one.submit_pseudogradients("a", differences(1.0)), -1.5)
        assert two.get_status()["counts"]["contributions"] == 2
        with short(one), pytest.raises(ServerLostError):  # of the next round
            one.submit_pseudogradients("a", differences(1.0))
        assert arrived(two) == ["a"]


def test_what_was_settled_of_a_call_that_timed_out_is_not_submitted_again(connect: Connect) -> None:
    with serve(num_fragments=2, **TWO) as server:
        one, two = connect(server, "a"), connect(server, "b")
        with short(one), pytest.raises(ServerLostError):
            one.submit_pseudogradients("a", differences(1.0))
        for fragment in range(2):
            two.submit_fragment_pseudogradients("b", fragment, differences(2.0))
            if fragment == 0:
                with short(one), pytest.raises(ServerLostError):
                    one.submit_pseudogradients("a", differences(1.0))
        assert is_all(one.submit_pseudogradients("a", differences(1.0)), -1.5)
        assert two.get_status()["counts"]["accepted"] == two.get_status()["counts"]["contributions"] == 4


def test_a_dropped_submission_is_an_error_with_the_newest_parameters(connect: Connect) -> None:
    with serve(num_workers=2, min_workers=1, max_staleness=0, initial_deadline=0.01, patience=1.0) as server:
        slow, fast = connect(server, "slow"), connect(server, "fast")
        assert is_all(fast.submit_pseudogradients("fast", differences(1.0)), -1.0)
        with pytest.raises(SubmissionDroppedError, match="1 versions late, max_staleness is 0") as dropped:
            slow.submit_pseudogradients("slow", differences(5.0))
        assert is_all(dropped.value.parameters, -1.0)
        assert set(dropped.value.dropped) == set(model())
        assert is_all(slow.submit_pseudogradients("slow", differences(1.0)), -2.0)


class GarblingConnection(Connection):
    """Passes on the next versions with a wrong bit."""

    num_wrong = 0

    def send(self, request: Request, body: Body = b"") -> tuple[Reply, memoryview]:
        reply, received = super().send(request, body)
        if isinstance(reply, Ready) and self.num_wrong:
            GarblingConnection.num_wrong -= 1
            received[-1] ^= 1
        return reply, received


def test_a_version_with_another_hash_is_fetched_again(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onstep.diloco.client.client.Connection", GarblingConnection)
    with serve(num_workers=1, min_workers=1) as server:
        client = connect(server, "a")
        GarblingConnection.num_wrong = 2
        assert is_all(client.submit_pseudogradients("a", differences(1.0)), -1.0)
        GarblingConnection.num_wrong = 4
        with pytest.raises(InvalidTensorsError, match="another hash than the server's"):
            client.submit_pseudogradients("a", differences(2.0))
        assert is_all(client.submit_pseudogradients("a", differences(2.0)), -3.0)
        assert client.get_status()["counts"]["contributions"] == 2


def test_a_refused_submission_is_over_and_another_may_follow(connect: Connect) -> None:
    with serve(num_workers=1, min_workers=1) as server:
        client = connect(server, "a")
        with pytest.raises(RefusedByServerError) as refused:
            client.submit_pseudogradients("a", {name: torch.zeros(7) for name in model()})
        assert refused.value.status == 422
        assert is_all(client.submit_pseudogradients("a", differences(1.0)), -1.0)
        with pytest.raises(ConfigError, match="got 'b'"):
            client.submit_pseudogradients("b", differences(1.0))
        with pytest.raises(ConfigError, match=r"layers\.1\.weight is missing"):
            client.submit_pseudogradients("a", {"layers.0.weight": torch.zeros(3)})


def test_an_evicted_worker_is_registered_again_by_its_next_submission(connect: Connect) -> None:
    with serve(num_workers=1, min_workers=1) as server:
        client = connect(server, "a")
        client.control("kick_worker", {"worker_id": "a"})
        with pytest.raises(RefusedByServerError) as refused:
            client.heartbeat("a")
        assert refused.value.status == 404
        assert is_all(client.submit_pseudogradients("a", differences(1.0)), -1.0)
