"""A worker that comes back continues where it was, or where the run is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from onstep.checkpoint.format.codec import decode_state, encode_state
from onstep.diloco.worker import DiLoCoWorker
from tests.diloco.worker.crew import ALONE, assert_close, batches, new_worker, small_model, train, trained_alone, values
from tests.diloco.worker.local_server import LocalServer


def saved(worker: DiLoCoWorker) -> Any:
    """The state, through the format of checkpoints."""
    tensors, document = encode_state(worker.state_dict())
    return decode_state({name: tensor.clone() for name, tensor in tensors.items()}, document)


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_restart_within_a_cycle_changes_nothing(codec: str) -> None:
    settings = replace(ALONE, sync_every=4, codec=codec)
    ends = []
    for interrupted in (False, True):
        server = LocalServer(values(small_model()), settings)
        model, optimizer, worker = new_worker(server)
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
    server = LocalServer(values(small_model()), ALONE)
    model, optimizer, worker = new_worker(server)
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


def test_a_joiner_gets_the_parameters_the_step_and_its_share_of_the_data() -> None:
    server = LocalServer(values(small_model()), replace(ALONE, num_workers=1, min_workers=1))
    model, optimizer, worker = new_worker(server, "first")
    with worker:
        train(model, optimizer, batches(0, 4))
        assert worker.registered.slot == 0
    joiner, _, worker = new_worker(server, "second")
    with worker:
        assert_close(values(joiner), trained_alone(4))
        assert worker.registered.step == 4
        assert worker.registered.versions == (2,)
