"""Whatever is lost on the way, no work is lost and none counts twice."""

from __future__ import annotations

import logging
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


def unreachable(request: Request, body: bytes = b"") -> tuple[Reply, Any]:
    raise ServerLostError("it is cut off")


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


def test_training_continues_without_the_server_and_all_of_it_counts_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onstep.diloco")
    server, model, optimizer, worker = local_worker()
    data = batches(0, 12)
    with worker:
        train(model, optimizer, data[:2])
        server.is_down = True
        train(model, optimizer, data[2:9])
        assert server.coordinator.versions == (1,)
        assert worker.sync_metrics["diloco/sync_retries"] == 3
        assert_close(values(model), trained_alone(9))
        assert "answers again" not in caplog.text
        assert [one for one in caplog.messages if "not answer" in one] == [
            "DiLoCo: the server does not answer (it is down); training continues, and its steps are submitted later"
        ]
        server.is_down = False
        train(model, optimizer, data[9:])
        assert worker.sync_metrics["diloco/sync_count"] == 6
    assert caplog.messages.count("DiLoCo: the server answers again, and has this worker's submission") == 1
    assert [one.sequence for one in server.submits] == [0, 1, 2, 3]
    assert [one.steps for one in server.submits] == [2, 2, 6, 2]
    assert_close(server.parameters(), trained_alone(12))
    assert_close(values(model), trained_alone(12))


def test_after_an_outage_all_fragments_are_submitted_at_once() -> None:
    settings = Settings(num_workers=1, min_workers=1, sync_every=8, num_fragments=2, overlap_steps=2, codec="fp32")
    server, model, optimizer, worker = local_worker(settings)
    data = batches(0, 28)
    with worker:
        train(model, optimizer, data[:8])
        server.is_down = True
        train(model, optimizer, data[8:23])
        server.is_down = False
        before = len(server.submits)
        train(model, optimizer, data[23:26])
        assert {one.fragment for one in server.submits[before:]} == {0, 1}, "though one alone is due"
        train(model, optimizer, data[26:])
    assert [sum(one.steps for one in server.submits if one.fragment == part) for part in (0, 1)] == [28, 28]


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


def test_a_worker_whose_work_is_too_old_starts_over_and_says_how_many_steps_are_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = LocalServer(values(small_model()), IMPATIENT)
    fast, fast_optimizer, fast_worker = new_worker(server, "fast")
    slow, slow_optimizer, slow_worker = new_worker(server, "slow")
    with slow_worker:
        with fast_worker:
            train(fast, fast_optimizer, batches(1, 2))
        train(slow, slow_optimizer, batches(0, 2))
        assert slow_worker.sync_metrics["diloco/dropped"] == 1
        assert slow_worker.sync_metrics["diloco/lost_steps"] == 2
        assert "2 steps of this worker are given up" in caplog.text
        assert_close(values(slow), values(fast))
        train(slow, slow_optimizer, batches(0, 4)[2:])
    assert [(one.worker_id, one.steps, one.base_version) for one in server.submits] == [
        ("fast", 2, 0),
        ("slow", 2, 0),
        ("slow", 2, 1),
    ]
    assert_close(server.parameters(), values(slow))


@pytest.mark.parametrize(("limit", "next_base", "lost"), [(5, 0, 0), (3, 4, 6)])
def test_what_was_trained_during_an_absence_is_as_old_as_the_version_that_it_began_from(
    limit: int, next_base: int, lost: int
) -> None:
    settings = replace(IMPATIENT, max_staleness=limit)
    server = LocalServer(values(small_model()), settings)
    away, away_optimizer, away_worker = new_worker(server, "away")
    other, other_optimizer, other_worker = new_worker(server, "other")
    data = batches(0, 10)
    away_worker.start()
    other_worker.start()
    send, server.send = server.send, unreachable  # type: ignore[method-assign]
    train(away, away_optimizer, data[:6])
    server.send = send  # type: ignore[method-assign]
    assert server.coordinator.evict("away", time.monotonic())
    train(other, other_optimizer, batches(1, 6))
    train(away, away_optimizer, data[6:10])
    first, second, *_ = {one.sequence: one for one in server.submits if one.worker_id == "away"}.values()
    assert (first.base_version, first.steps) == (0, 2)
    assert (second.base_version, second.steps) == (next_base, 2 if lost else 6)
    assert away_worker.sync_metrics.get("diloco/lost_steps", 0) == lost
    away_worker.stop(merge=False)
    other_worker.stop(merge=False)


def test_what_a_codec_lost_of_dropped_work_is_not_sent_as_well() -> None:
    server = LocalServer(values(small_model()), replace(IMPATIENT, codec="int4"))
    slow, slow_optimizer, slow_worker = new_worker(server, "slow")
    fast, fast_optimizer, fast_worker = new_worker(server, "fast")
    with slow_worker:
        with fast_worker:
            train(fast, fast_optimizer, batches(1, 2))
        train(slow, slow_optimizer, batches(0, 2))
        assert slow_worker.sync_metrics["diloco/dropped"] == 1
        assert slow_worker.state_dict()["divided"]["residuals"] == {}


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
    assert state["divided"]["residuals"]
    _, _, slow_worker = new_worker(server, "slow")
    slow_worker.load_state_dict(state)
    with slow_worker:
        assert slow_worker.state_dict()["divided"]["residuals"] == {}


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
