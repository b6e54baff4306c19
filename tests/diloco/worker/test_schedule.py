"""When what is submitted: fragments in turn, dynamic cycles, weights, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from onstep.diloco.protocol.messages import Heartbeat, Register, Settings
from onstep.diloco.worker import DiLoCoWorker
from onstep.diloco.worker.pace import Pace
from tests.diloco.worker.crew import (
    ALONE,
    assert_close,
    batches,
    local_worker,
    small_model,
    train,
    train_crew,
    trained_alone,
    values,
)
from tests.diloco.worker.local_server import LocalServer
from tests.support.waiting import until


def test_fragments_are_submitted_in_turn_and_blended_with_what_was_learned_meanwhile() -> None:
    settings = replace(ALONE, sync_every=4, num_fragments=2, blend=0.25)
    server, model, optimizer, worker = local_worker(settings)
    with worker:
        train(model, optimizer, batches(0, 8)[:2])
        sent = values(model)
        assert [one.fragment for one in server.submits] == [0] or not server.submits
        until(lambda: server.coordinator.versions == (1, 0))
        until(worker._synchronizer.exchange._waiting[0].done)  # type: ignore[union-attr]
        before = small_model()
        before.load_state_dict({**model.state_dict()})
        train(before, torch.optim.SGD(before.parameters(), lr=0.1), batches(0, 8)[2:3])
        train(model, optimizer, batches(0, 8)[2:3])
        for name, value in values(before).items():
            is_first = name in server.fragments[0].newest.parameters
            expected = 0.25 * value + 0.75 * sent[name] if is_first else value
            torch.testing.assert_close(values(model)[name], expected, rtol=0, atol=1e-12)
        train(model, optimizer, batches(0, 8)[3:])
        assert worker.sync_metrics["diloco/num_fragments"] == 2
        assert worker.sync_metrics["diloco/fragment_syncs"] == 4
    assert [one.fragment for one in server.submits] == [0, 1, 0, 1, 0]
    assert server.coordinator.versions == (3, 2)
    assert [one.steps for one in server.submits] == [2, 4, 4, 4, 2]


def test_workers_with_fragments_in_flight_get_every_version() -> None:
    settings = Settings(num_workers=3, min_workers=3, sync_every=6, num_fragments=2, codec="int8")
    server = LocalServer(values(small_model(dtype=torch.float32)), settings)
    results = train_crew(lambda: server, 3, steps=24, dtype=torch.float32)
    assert server.coordinator.versions == (5, 4)
    assert server.coordinator.counts["contributions"] == 27
    assert {metrics["diloco/sync_count"] for _, metrics in results} == {4}


def _train_beside_a_fast_one(server: LocalServer, worker: DiLoCoWorker, model: nn.Module, optimizer: Optimizer) -> None:
    """Take 8 steps; from the third on, the worker knows what the server recommends because of the fast one."""
    server.send(Register("fast", "s", server.coordinator.fingerprint))
    server.send(Heartbeat("fast", "s", steps_per_second=1e9))
    train(model, optimizer, batches(0, 2))
    until(lambda: worker._synchronizer.heartbeat.recommended_sync_every is not None)  # type: ignore[union-attr]
    train(model, optimizer, batches(0, 8)[2:])


def test_slow_workers_take_the_steps_that_the_server_recommends() -> None:
    settings = replace(ALONE, mode="async", sync_every=4, dylu=True, heartbeat_timeout=0.0)
    server, model, optimizer, worker = local_worker(settings, heartbeat_interval=0.005)
    with worker:
        _train_beside_a_fast_one(server, worker, model, optimizer)
        assert worker.sync_metrics["diloco/sync_every"] == 1
        assert worker.sync_metrics["diloco/dylu_adjustments"] == 1
    assert [one.steps for one in server.submits] == [4, 1, 1, 1, 1]


def test_a_worker_may_decline_what_the_server_recommends() -> None:
    server, model, optimizer, worker = local_worker(
        replace(ALONE, mode="async", sync_every=4, dylu=True), heartbeat_interval=0.005, dylu=False
    )
    with worker:
        _train_beside_a_fast_one(server, worker, model, optimizer)
        assert worker.sync_metrics["diloco/sync_every"] == 4


def test_submissions_are_weighted_by_the_tokens_that_the_caller_counts() -> None:
    server = LocalServer(values(small_model()), ALONE)
    model = small_model()
    with DiLoCoWorker(model, None, "", client=server, heartbeat_interval=0) as worker:
        for tokens in (10, torch.tensor(7), 3.0, 4):
            worker.end_step(tokens)
    assert [one.tokens for one in server.submits] == [17, 7]


def test_what_is_left_of_a_cycle_can_be_submitted_by_hand() -> None:
    server, model, optimizer, worker = local_worker()
    with pytest.raises(RuntimeError, match="not active"):
        worker.force_sync()
    with worker:
        train(model, optimizer, batches(0, 3))
        for _ in range(2):  # the second time there is nothing to submit
            worker.force_sync()
        assert_close(server.parameters(), trained_alone(3))
        assert worker.sync_metrics["diloco/sync_count"] == 2
        assert worker.sync_metrics["diloco/local_step"] == 0
    assert [one.steps for one in server.submits] == [2, 1]


def test_the_pace_leaves_out_the_time_that_was_waited() -> None:
    now = 0.0
    pace = Pace(clock=lambda: now)
    for _ in range(5):
        now += 0.5
        pace.count_step()
        now += 10
        pace.leave_out(10)
    assert pace.steps_per_second() == 2
