"""A worker that comes back continues where it was, or where the run is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onstep.diloco.codec.body import write_body
from onstep.diloco.codec.specs import InvalidTensorsError
from onstep.diloco.protocol.messages import Register, Submit
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


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_restart_within_a_cycle_changes_nothing(codec: str) -> None:
    settings = replace(ALONE, sync_every=4, codec=codec)
    ends = []
    for interrupted in (False, True):
        server, model, optimizer, worker = local_worker(settings)
        worker.start()
        train(model, optimizer, batches(0, 12)[:6])
        if interrupted:
            state, weights = saved(worker), values(model)
            train(model, optimizer, batches(0, 12)[6:7])  # lost with the process
            model, optimizer, worker = new_worker(server)
            model.load_state_dict(weights)
            worker.load_state_dict(state)
            worker.start()
            assert worker.sync_metrics["diloco/local_step"] == 2
        train(model, optimizer, batches(0, 12)[6:])
        worker.stop()
        assert [one.steps for one in server.submits] == [4, 4, 4]
        ends.append(server.parameters())
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def test_a_checkpoint_from_before_a_submission_does_not_count_twice() -> None:
    server, model, optimizer, worker = local_worker()
    worker.start()
    train(model, optimizer, batches(0, 4)[:1])
    state, weights = saved(worker), values(model)
    train(model, optimizer, batches(0, 4)[1:3])  # the submission counts, and the process dies

    model, optimizer, worker = new_worker(server)
    model.load_state_dict(weights)
    worker.load_state_dict(state)
    with worker:
        assert_close(values(model), trained_alone(2))
        assert worker.sync_metrics["diloco/local_step"] == 0
        train(model, optimizer, batches(0, 4)[2:])
    assert server.coordinator.counts["contributions"] == 2
    assert_close(server.parameters(), trained_alone(4))


def test_a_checkpoint_from_before_a_submission_to_the_open_round_does_not_count_twice() -> None:
    server, model, optimizer, worker = local_worker(replace(ALONE, num_workers=2, min_workers=2), timeout=0.1)
    worker.start()
    train(model, optimizer, batches(0, 2)[:1])
    state, weights = saved(worker), values(model)
    train(model, optimizer, batches(0, 2)[1:])
    assert worker.sync_metrics["diloco/sync_retries"] == 1

    model, optimizer, worker = new_worker(server, timeout=0.1)
    model.load_state_dict(weights)
    worker.load_state_dict(state)
    with worker:
        assert_close(values(model), values(small_model()))
        assert not worker.has_resumed


@pytest.mark.parametrize("moved", [0, 1])
def test_samples_continue_after_a_restart_only_if_the_fragment_that_counts_them_does(moved: int) -> None:
    """While the worker was away, one fragment of two has got a newer version, so that its local step is lost."""
    settings = replace(ALONE, sync_every=4, num_fragments=2)
    server, model, optimizer, worker = local_worker(settings, "first")
    worker.start()
    train(model, optimizer, batches(0, 1))
    state, weights = saved(worker), values(model)
    worker.stop(merge=False)
    server.send(Register("second", "s", server.coordinator.fingerprint))
    body = write_body({name: torch.zeros_like(one) for name, one in server.fragments[moved].newest.parameters.items()})
    server.send(Submit("second", "s", 0, moved, 0, 1, 1, "fp32"), body)

    model, _, worker = new_worker(server, "first")
    model.load_state_dict(weights)
    worker.load_state_dict(state)
    with worker:
        assert worker.registered.versions == (1 - moved, moved)
        assert worker.sync_metrics["diloco/local_step"] == 1, "the other fragment continues"
        assert worker.has_resumed == (moved == 1)


@pytest.mark.parametrize("num_newer", [0, 1, 2])
def test_what_a_codec_lost_before_a_checkpoint_is_sent_once(num_newer: int) -> None:
    """The checkpoint has a submission whose answer was lost; the server counts it, and `num_newer - 1` after it."""
    server, model, optimizer, worker = local_worker(replace(ALONE, codec="int4"))
    worker.start()
    train(model, optimizer, batches(0, 2))
    server.is_down, server.lose_answers_of = num_newer == 0, {Submit}
    train(model, optimizer, batches(0, 4)[2:])
    state, weights = saved(worker), values(model)
    assert state["exchange"]["session"]["pending"] == [0]
    if num_newer == 2:
        train(model, optimizer, batches(0, 6)[4:])
    server.is_down, server.lose_answers_of = False, set()
    before = state["divided"]["before"]

    model, optimizer, worker = new_worker(server)
    model.load_state_dict(weights)
    worker.load_state_dict(state)
    with worker:
        found = worker.state_dict()["divided"]["residuals"]
        expected = [before, state["divided"]["residuals"], {}][num_newer]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_joiner_gets_the_parameters_the_step_and_its_share_of_the_data() -> None:
    server, model, optimizer, worker = local_worker(replace(ALONE, num_workers=1, min_workers=1), "first")
    with worker:
        train(model, optimizer, batches(0, 4))
        assert worker.registered.slot == 0
    joiner, _, worker = new_worker(server, "second")
    with worker:
        assert_close(values(joiner), trained_alone(4))
        assert worker.registered.step == 4
        assert worker.registered.versions == (2,)


def test_work_that_is_in_the_open_round_already_is_not_done_again() -> None:
    server = LocalServer(values(small_model()), replace(ALONE, num_workers=2, min_workers=2))
    other, other_optimizer, other_worker = new_worker(server, "other")
    other_worker.start()
    model, optimizer, worker = new_worker(server, timeout=0.1)
    worker.start()
    train(model, optimizer, batches(0, 2)[:1])
    state, weights = saved(worker), values(model)
    train(model, optimizer, batches(0, 2)[1:])  # submitted, and the process dies before the round is committed
    assert server.coordinator.versions == (0,)

    model, optimizer, worker = new_worker(server)
    model.load_state_dict(weights)
    worker.load_state_dict(state)
    worker.start()
    assert_close(values(model), values(small_model()), 0)  # not the step that the submission has
    train(other, other_optimizer, batches(1, 2))
    worker.stop(merge=False)
    other_worker.stop()
    assert [(one.worker_id, one.steps) for one in server.submits] == [("w", 2), ("other", 2)]
    assert server.coordinator.counts["contributions"] == 2


def test_steps_that_no_server_has_and_that_are_too_old_after_a_restart_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, model, optimizer, worker = local_worker(replace(ALONE, num_workers=1, min_workers=1), "first")
    worker.start()
    train(model, optimizer, batches(0, 2))
    server.is_down = True
    train(model, optimizer, batches(0, 4)[2:])  # ends with a cycle
    state, weights = saved(worker), values(model)
    server.is_down = False

    other, its_optimizer, second = new_worker(server, "second")
    with second:
        train(other, its_optimizer, batches(1, 4))

    model, _, worker = new_worker(server, "first")
    model.load_state_dict(weights)
    worker.load_state_dict(state)
    with worker:
        assert worker.metrics.lost_steps == 2
    assert "2 steps of this worker are given up" in caplog.text


def test_residuals_of_another_model_are_refused() -> None:
    server, model, optimizer, worker = local_worker(replace(ALONE, codec="int4"))
    worker.start()
    train(model, optimizer, batches(0, 2))
    state = saved(worker)
    for name, text in (("v", "no such parameter"), ("0.bias", r"but this model has \[5\]")):
        _, _, other = new_worker(server)
        other.load_state_dict({**state, "divided": {"residuals": {name: torch.zeros(7)}, "before": {}}})
        with pytest.raises(InvalidTensorsError, match=text):
            other.start()
