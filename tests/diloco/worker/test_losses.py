"""Whatever is lost on the way, no work is lost and none counts twice."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from onstep.diloco.client import RefusedByServerError, ServerLostError
from onstep.diloco.protocol.messages import Await, Register, Reply, Request, Settings, Submit
from tests.diloco.worker.crew import (
    ALONE,
    assert_close,
    batches,
    local_worker,
    new_worker,
    saved,
    small_model,
    train,
    trained_alone,
    values,
)
from tests.diloco.worker.local_server import LocalServer

IMPATIENT = Settings(
    num_workers=2, min_workers=1, sync_every=2, codec="fp32", max_staleness=0, initial_deadline=0.01, patience=1.0
)
"""A round does not wait for the slower worker."""


@pytest.mark.parametrize("lost", [Register, Submit, Await])
def test_a_request_whose_answer_was_lost_counts_once(lost: type) -> None:
    server, model, optimizer, worker = local_worker(ALONE, max_sync_retries=3)
    if lost is Register:
        server.lose_answers_of = {lost}
    with worker:
        train(model, optimizer, batches(0, 6)[:2])
        server.lose_answers_of = {lost} - {Register}
        train(model, optimizer, batches(0, 6)[2:])
    assert server.coordinator.counts["contributions"] == 3
    assert_close(server.parameters(), trained_alone(6))


def test_training_continues_without_the_server_and_all_of_it_counts_later() -> None:
    server, model, optimizer, worker = local_worker()
    data = batches(0, 12)
    with worker:
        train(model, optimizer, data[:2])
        server.is_down = True
        train(model, optimizer, data[2:9])
        assert server.coordinator.versions == (1,)
        assert worker.sync_metrics["diloco/sync_retries"] == 3
        assert_close(values(model), trained_alone(9))
        server.is_down = False
        train(model, optimizer, data[9:])
        assert worker.sync_metrics["diloco/sync_count"] == 6
    assert [one.sequence for one in server.submits] == [0, 1, 2, 3]
    assert [one.steps for one in server.submits] == [2, 2, 6, 2]
    assert_close(server.parameters(), trained_alone(12))
    assert_close(values(model), trained_alone(12))


def test_streaming_keeps_all_that_is_trained_without_the_server() -> None:
    settings = Settings(num_workers=1, min_workers=1, sync_every=2, num_fragments=2, codec="fp32", blend=0.5)
    server, model, optimizer, worker = local_worker(settings)
    data = batches(0, 8)
    with worker:
        server.is_down = True
        train(model, optimizer, data[:7])
        server.is_down = False
        train(model, optimizer, data[7:])
        assert_close(values(model), trained_alone(8))


def test_an_evicted_worker_keeps_its_work_and_submits_it() -> None:
    server, model, optimizer, worker = local_worker()
    with worker:
        train(model, optimizer, batches(0, 4)[:3])
        assert server.coordinator.evict("w", time.monotonic())
        train(model, optimizer, batches(0, 4)[3:])
        assert worker.sync_metrics["diloco/reconnections"] == 1
    assert_close(server.parameters(), trained_alone(4))


def test_work_that_was_dropped_stays_in_the_model_and_is_in_the_next_submission() -> None:
    server = LocalServer(values(small_model()), IMPATIENT)
    fast, fast_optimizer, fast_worker = new_worker(server, "fast")
    slow, slow_optimizer, slow_worker = new_worker(server, "slow")
    with slow_worker:
        with fast_worker:
            train(fast, fast_optimizer, batches(1, 2))
        start = values(small_model())
        after_fast = values(fast)
        train(slow, slow_optimizer, batches(0, 2))
        assert slow_worker.sync_metrics["diloco/dropped"] == 1
        progress = {name: value - start[name] for name, value in trained_alone(2).items()}
        assert_close(values(slow), {name: value + progress[name] for name, value in after_fast.items()})
        train(slow, slow_optimizer, batches(0, 4)[2:])
    assert [(one.worker_id, one.steps, one.base_version) for one in server.submits] == [
        ("fast", 2, 0),
        ("slow", 2, 0),
        ("slow", 4, 1),
    ]
    assert_close(server.parameters(), values(slow))


def test_what_a_codec_lost_of_dropped_work_is_not_sent_as_well() -> None:
    server = LocalServer(values(small_model()), replace(IMPATIENT, codec="int4"))
    slow, slow_optimizer, slow_worker = new_worker(server, "slow")
    fast, fast_optimizer, fast_worker = new_worker(server, "fast")
    with slow_worker:
        with fast_worker:
            train(fast, fast_optimizer, batches(1, 2))
        train(slow, slow_optimizer, batches(0, 2))
        assert slow_worker.sync_metrics["diloco/dropped"] == 1
        assert slow_worker.state_dict()["exchange"]["feedback"]["residuals"] == {}


def test_what_a_codec_lost_of_dropped_work_is_not_sent_after_a_restart_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint is from between the refusal and the newest version."""
    server = LocalServer(values(small_model()), replace(IMPATIENT, codec="int4"))
    slow, slow_optimizer, slow_worker = new_worker(server, "slow", timeout=0.1)
    fast, fast_optimizer, fast_worker = new_worker(server, "fast")
    slow_worker.start()
    with fast_worker:
        train(fast, fast_optimizer, batches(1, 2))
    send = server.send

    def send_but_get_no_version(request: Request, body: bytes = b"") -> tuple[Reply, Any]:
        if isinstance(request, Await):
            raise ServerLostError("no answer")
        return send(request, body)

    with monkeypatch.context() as patched:
        patched.setattr(server, "send", send_but_get_no_version)
        train(slow, slow_optimizer, batches(0, 2))
    assert slow_worker.sync_metrics["diloco/sync_retries"] == 1
    state = saved(slow_worker)
    assert state["exchange"]["feedback"]["residuals"]
    _, _, slow_worker = new_worker(server, "slow")
    slow_worker.load_state_dict(state)
    with slow_worker:
        assert slow_worker.state_dict()["exchange"]["feedback"]["residuals"] == {}


def test_a_worker_whose_id_another_process_took_over_stops() -> None:
    server, model, optimizer, worker = local_worker()
    _, _, other = new_worker(server)
    worker.start()
    other.start()
    with pytest.raises(RefusedByServerError):
        train(model, optimizer, batches(0, 2))
    worker.stop(merge=False)
    other.stop()


def test_a_worker_does_not_start_without_a_server() -> None:
    server = LocalServer(values(small_model()), ALONE)
    server.is_down = True
    with pytest.raises(ServerLostError, match=r"no answer from the server: it is down; is it running\?"):
        new_worker(server)[2].start()
