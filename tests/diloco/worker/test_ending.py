"""A worker that ends submits its last steps, and waits for others no longer than there are any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.protocol.messages import Await, Heartbeat, Ready, Reply, Request, Settings
from onstep.diloco.server import DiLoCoServer
from tests.diloco.worker.crew import (
    assert_close,
    batches,
    in_threads,
    local_worker,
    new_worker,
    sgd,
    small_model,
    train,
    trained_alone,
    values,
)
from tests.diloco.worker.local_server import LocalServer
from tests.support.waiting import PATIENCE

TWO = Settings(num_workers=2, min_workers=2, sync_every=4, codec="fp32")


def ends_after(connect: Callable[[], Any], steps: list[int]) -> list[dict[str, Tensor]]:
    """The final parameters of workers that take so many steps each; all register before the first step."""
    everybody = threading.Barrier(len(steps))

    def work(index: int) -> dict[str, Tensor]:
        model, optimizer, worker = new_worker(connect(), f"w{index}", timeout=30)
        with worker:
            everybody.wait(PATIENCE)
            train(model, optimizer, batches(index, steps[index]))
        return values(model)

    return in_threads(work, len(steps))


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert all(torch.equal(one[name], value) for name, value in other.items())


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_workers_that_end_together_within_a_cycle_end_with_the_model_of_the_server(num_fragments: int) -> None:
    server = LocalServer(values(small_model()), replace(TWO, num_fragments=num_fragments))
    one, other = ends_after(lambda: server, [6, 6])
    assert_equal(one, other)
    assert_equal(one, server.parameters())
    assert sum(submit.steps for submit in server.submits) == 2 * 6 * num_fragments
    assert server.coordinator.counts["departures"] == 2


def test_they_do_so_over_sockets() -> None:
    with DiLoCoServer(small_model(), settings=TWO, outer_optimizer_factory=sgd, port=0, token="s") as server:
        one, other = ends_after(lambda: DiLoCoClient(server.address, token="s"), [3, 3])
        assert_equal(one, other)
        assert_equal(one, server.get_global_params())


def test_one_that_ends_earlier_is_in_the_next_round_of_the_others() -> None:
    server = LocalServer(values(small_model()), replace(TWO, min_workers=1))
    ends_after(lambda: server, [1, 5])
    *first_round, last = [(one.worker_id, one.steps) for one in server.submits]
    assert sorted(first_round) == [("w0", 1), ("w1", 4)]
    assert last == ("w1", 1)
    assert server.coordinator.counts["contributions"] == 3
    assert server.coordinator.versions == (2,)


def test_one_whom_the_others_have_left_without_a_quorum_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    server = LocalServer(values(small_model()), TWO)
    _, _, other = new_worker(server, "other")
    other.start()
    model, optimizer, worker = new_worker(server, "w", timeout=600)
    with worker:
        train(model, optimizer, batches(0, 3))
        other.stop(merge=False)
    assert_close(values(model), trained_alone(3))
    assert "fewer than the quorum are registered; give all workers as many steps, or start" in caplog.text
    assert server.coordinator.versions == (0,)
    assert server.coordinator.counts["departures"] == 2


def test_a_command_reaches_one_whom_the_others_have_left_in_the_middle_of_a_round() -> None:
    server = LocalServer(values(small_model()), TWO)
    _, _, other = new_worker(server, "other")
    other.start()
    model, optimizer, worker = new_worker(server, "w", timeout=600, heartbeat_interval=0.1)
    with worker:
        other.stop(merge=False)
        server.coordinator.command("graceful_stop")
        train(model, optimizer, batches(0, 5))  # a round is due after four, for which there is no quorum
        assert worker.take_commands() == ["graceful_stop"]
    assert_close(values(model), trained_alone(5))


class SlowLine(LocalServer):
    """Sends the version of one worker only when the others have long left."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.num_beats, self.has_asked = 0, threading.Event()

    def send(self, request: Request, body: bytes = b"") -> tuple[Reply, Any]:
        reply, answer = super().send(request, body)
        if isinstance(request, Heartbeat):
            self.num_beats += 1
            if self.num_beats == 3:
                self.has_asked.set()
        if isinstance(request, Await) and isinstance(reply, Ready) and reply.version and request.worker_id == "w0":
            assert self.has_asked.wait(PATIENCE)
        return reply, answer


def test_one_whose_result_is_still_on_its_way_waits_for_it() -> None:
    server = SlowLine(values(small_model()), TWO)
    one, other = ends_after(lambda: server, [3, 3])
    assert_equal(one, other)
    assert_equal(one, server.parameters())


def test_a_worker_that_fails_submits_nothing_more() -> None:
    server, model, optimizer, worker = local_worker()
    with pytest.raises(ValueError, match="not enough values"), worker:
        train(model, optimizer, [*batches(0, 3), (torch.ones(1, 3),)])  # type: ignore[list-item]
    assert [one.steps for one in server.submits] == [2]
    assert server.coordinator.counts["departures"] == 1
