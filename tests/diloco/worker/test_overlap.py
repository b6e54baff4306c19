"""Rounds that are merged while training continues compute what the papers' algorithms do, and survive a kill."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.fragments import assign, due
from onstep.diloco.outer import nesterov_sgd
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.worker import DiLoCoWorker
from onstep.errors import ConfigError
from tests.diloco.worker.crew import (
    assert_close,
    batches,
    in_threads,
    nesterov,
    new_worker,
    saved,
    small_model,
    train,
    train_crew,
    values,
)
from tests.diloco.worker.local_server import LocalServer
from tests.support.forked_processes import Processes

Tensors = dict[str, Tensor]
COUNT, EVERY, STEPS, ALPHA = 2, 6, 24, 0.25
SETTINGS = Settings(num_workers=COUNT, min_workers=COUNT, sync_every=EVERY, codec="fp32", blend=ALPHA)


def new_server(settings: Settings, outer: Any = nesterov_sgd) -> DiLoCoServer:
    return DiLoCoServer(small_model(), settings=settings, outer_optimizer_factory=outer, port=0, token="secret")


def trained(settings: Settings) -> list[Tensors]:
    """The parameters of each worker after STEPS steps, over real sockets."""
    with new_server(settings) as server:
        results = train_crew(lambda: DiLoCoClient(server.address, token="secret"), COUNT, STEPS)
    return [parameters for parameters, _ in results]


class Replicas:
    """Models that train in turn on the batches of their workers, and the outer parameters."""

    def __init__(self) -> None:
        self.outer = small_model()
        self.models = [small_model() for _ in range(COUNT)]
        self.inner = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]

    def train(self, step: int) -> None:
        for worker, (model, optimizer) in enumerate(zip(self.models, self.inner, strict=True)):
            train(model, optimizer, batches(worker, STEPS)[step - 1 : step])


@torch.no_grad()
def streaming(num_fragments: int, overlap_steps: int) -> list[Tensors]:
    """Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", algorithm 2."""
    replicas = Replicas()
    outer = dict(replicas.outer.named_parameters())
    parts = [[spec.name for spec in part] for part in assign(specs_of(values(replicas.outer)), num_fragments)]
    optimizers = [nesterov([outer[name] for name in part]) for part in parts]
    sent: dict[tuple[int, int], Tensors] = {}
    for step in range(1, STEPS + 1):
        with torch.enable_grad():
            replicas.train(step)
        for part, names in enumerate(parts):
            average = sent.pop((part, step - overlap_steps), None)
            if average is not None:
                for name in names:
                    outer[name].grad = average[name]
                optimizers[part].step()
                for model in replicas.models:
                    for name in names:
                        local = model.get_parameter(name)
                        local.copy_(ALPHA * local + (1 - ALPHA) * outer[name])
        for part in due((step - 1) % EVERY + 1, EVERY, num_fragments):
            changes = [
                {name: outer[name] - model.get_parameter(name) for name in parts[part]} for model in replicas.models
            ]
            sent[part, step] = {name: torch.stack([one[name] for one in changes]).mean(0) for name in parts[part]}
    return [values(model) for model in replicas.models]


def eager() -> list[Tensors]:
    """Kale et al. 2025, "Eager Updates for Overlapped Communication and Computation in DiLoCo", algorithm 2.

    Each replica has an outer optimizer of its own, and its average is one round old in all parts but its own.
    """
    replicas = Replicas()
    outers = [small_model() for _ in range(COUNT)]
    optimizers = [nesterov(list(outer.parameters())) for outer in outers]
    nothing = [torch.zeros_like(one) for one in replicas.outer.parameters()]
    before, average = [nothing] * COUNT, nothing
    for step in range(1, STEPS + 1):
        replicas.train(step)
        if step % EVERY:
            continue
        ends = [list(model.parameters()) for model in replicas.models]
        changes = [
            [start.detach() - end.detach() for start, end in zip(outer.parameters(), ends[worker], strict=True)]
            for worker, outer in enumerate(outers)
        ]
        for worker, outer in enumerate(outers):
            for parameter, new, old, all_old in zip(
                outer.parameters(), changes[worker], before[worker], average, strict=True
            ):
                parameter.grad = (new - old) / COUNT + all_old
            optimizers[worker].step()
            replicas.models[worker].load_state_dict(outer.state_dict())
        before, average = changes, [torch.stack(all_of).mean(0) for all_of in zip(*changes, strict=True)]
    return [values(model) for model in replicas.models]


@pytest.mark.parametrize(("num_fragments", "overlap_steps"), [(1, 1), (1, EVERY), (2, 2), (2, 5)])
def test_a_fixed_overlap_is_that_of_streaming_diloco(num_fragments: int, overlap_steps: int) -> None:
    settings = replace(SETTINGS, num_fragments=num_fragments, overlap_steps=overlap_steps)
    for found, expected in zip(trained(settings), streaming(num_fragments, overlap_steps), strict=True):
        assert_close(found, expected, 1e-10)


def test_eager_updates_are_those_of_the_paper() -> None:
    for found, expected in zip(trained(replace(SETTINGS, overlap_steps=EVERY, eager=True)), eager(), strict=True):
        assert_close(found, expected, 1e-10)


def test_eager_workers_of_fragments_end_with_the_model_of_the_server() -> None:
    with new_server(replace(SETTINGS, overlap_steps=3, eager=True, num_fragments=2)) as server:

        def work(index: int) -> Tensors:
            model = small_model(seed=index + 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            client = DiLoCoClient(server.address, token="secret")
            with DiLoCoWorker(model, optimizer, "", worker_id=f"w{index}", client=client):
                train(model, optimizer, batches(index, STEPS))
            return values(model)

        for parameters in in_threads(work, COUNT):
            assert_close(parameters, server.get_global_params(), 0)


@pytest.mark.parametrize("is_eager", [False, True])
def test_one_eager_worker_gets_what_it_has_applied_itself(is_eager: bool) -> None:
    """So that nothing is left to correct, and a run without any overlap is the reference."""
    alone = replace(SETTINGS, num_workers=1, min_workers=1)
    eager_alone = replace(alone, eager=is_eager, overlap_steps=4 if is_eager else None)
    ends = []
    for settings in (alone, eager_alone):
        with new_server(settings) as server:
            ((parameters, _),) = train_crew(lambda: DiLoCoClient(server.address, token="secret"), 1, STEPS)
        ends.append(parameters)
    assert_close(ends[0], ends[1], 1e-12)


def job_worker(settings: dict[str, Any]) -> None:
    """Train from the checkpoint, if there is one; after `dies_at` steps make one, and die of SIGKILL."""
    saved, model = Path("checkpoint"), small_model(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = DiLoCoWorker(model, optimizer, settings["address"], worker_id="w", auth_token="secret")
    step = 0
    if saved.exists():
        state = torch.load(saved)
        step = state["step"]
        model.load_state_dict(state["model"])
        worker.load_state_dict(state["worker"])
    with worker:
        data = batches(0, STEPS)[step:]
        train(model, optimizer, data[: settings["dies_at"] - step])
        if settings["dies_at"] < STEPS:
            state = {"step": settings["dies_at"], "model": model.state_dict(), "worker": worker.state_dict()}
            torch.save(state, saved)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save(values(model), "end")


@pytest.mark.process
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_run_killed_with_a_fragment_in_flight_continues_as_if_it_had_not_been(
    is_eager: bool, processes: Processes, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, num_workers=1, min_workers=1, num_fragments=2, overlap_steps=5, eager=is_eager)
    ends = []
    for deaths in ([], [10, 16]):  # one and two steps after a submission, which the server may have or not
        directory = tmp_path / str(len(deaths))
        directory.mkdir()
        with new_server(replace(settings, codec="int8")) as server:
            for dies_at in (*deaths, STEPS):
                job = {"address": server.address, "dies_at": dies_at}
                codes = processes.run("tests.diloco.worker.test_overlap", "worker", directory, job)
                assert codes == [0 if dies_at == STEPS else -signal.SIGKILL]
            assert server._state.coordinator.counts["contributions"] == 9
        ends.append(torch.load(directory / "end"))
    assert_close(ends[0], ends[1], 0)


def test_a_submission_in_flight_that_no_server_got_is_sent_again_by_the_next_session() -> None:
    settings = replace(SETTINGS, num_workers=1, min_workers=1, overlap_steps=4, eager=True)
    ends = []
    for is_lost in (False, True):
        server = LocalServer(values(small_model()), settings)
        model, optimizer, worker = new_worker(server)
        worker.start()
        train(model, optimizer, batches(0, STEPS)[: EVERY - 1])
        server.is_down = is_lost
        train(model, optimizer, batches(0, STEPS)[EVERY - 1 : EVERY + 1])
        if is_lost:
            state, weights = saved(worker), values(model)
            server.is_down = False
            model, optimizer, worker = new_worker(server)
            model.load_state_dict(weights)
            worker.load_state_dict(state)
            worker.start()
        train(model, optimizer, batches(0, STEPS)[EVERY + 1 :])
        worker.stop()
        ends.append(values(model))
        assert [one.steps for one in server.submits][-3:] == [6, 6, 6]
    assert_close(ends[0], ends[1], 0)


def test_a_submission_in_flight_that_is_found_again_after_many_rounds_is_as_late_as_any() -> None:
    settings = replace(SETTINGS, num_workers=2, min_workers=1, overlap_steps=4, max_staleness=1)
    server = LocalServer(values(small_model()), settings)
    model, optimizer, worker = new_worker(server)
    worker.start()
    train(model, optimizer, batches(0, STEPS)[: EVERY + 1])
    state, weights = saved(worker), values(model)
    other, its_optimizer, its_worker = new_worker(server, "other")
    its_worker.start()
    train(other, its_optimizer, batches(1, 5 * EVERY))
    its_worker.stop()
    assert server.fragments[0].newest.number > 3
    model, optimizer, worker = new_worker(server)
    model.load_state_dict(weights)
    worker.load_state_dict(state)
    worker.start()
    train(model, optimizer, batches(0, STEPS)[EVERY + 1 : EVERY + 4])
    assert worker.metrics.lost_steps == 4, "those since the submission, which counted"
    assert_close(values(model), server.parameters(), 0)
    worker.stop()


def test_a_submission_in_flight_to_a_version_that_the_server_has_lost_is_not_sent_again() -> None:
    settings = replace(SETTINGS, num_workers=1, min_workers=1, overlap_steps=4)
    server = LocalServer(values(small_model()), settings)
    model, optimizer, worker = new_worker(server)
    worker.start()
    train(model, optimizer, batches(0, STEPS)[: 3 * EVERY + 1])
    state, weights = saved(worker), values(model)
    restored = LocalServer(values(small_model(seed=3)), settings)  # an older copy
    model, optimizer, worker = new_worker(restored)
    model.load_state_dict(weights)
    worker.load_state_dict(state)
    worker.start()
    assert not restored.submits
    assert_close(values(model), restored.parameters(), 0)
    train(model, optimizer, batches(0, STEPS)[:EVERY])
    worker.stop()
    assert [one.base_version for one in restored.submits][:1] == [0]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"overlap_steps": 0}, "overlap_steps must be from 1 to sync_every"),
        ({"overlap_steps": EVERY + 1}, "overlap_steps must be from 1 to sync_every"),
        ({"eager": True, "mode": "async"}, "eager must be False in asynchronous mode"),
    ],
)
def test_an_overlap_that_cannot_be_is_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        new_server(replace(SETTINGS, **changes))


def test_the_rates_that_an_operator_sets_reach_eager_workers_with_the_next_round() -> None:
    with new_server(replace(SETTINGS, num_workers=1, min_workers=1, overlap_steps=2, eager=True)) as server:
        model, optimizer, worker = new_worker(DiLoCoClient(server.address, token=server.token))  # type: ignore[arg-type]
        with worker, DiLoCoClient(server.address, token=server.token) as operator:
            train(model, optimizer, batches(0, EVERY))
            operator.control("update_optimizer", {"lr": 0.25, "momentum": 0.5})
            train(model, optimizer, batches(0, 2 * EVERY))
            assert (worker.registered.outer_lr, worker.registered.outer_momentum) == (0.25, 0.5)


def test_eager_requires_an_outer_optimizer_that_workers_can_repeat() -> None:
    with pytest.raises(ConfigError, match=r"eager requires an outer optimizer that is torch\.optim\.SGD"):
        new_server(replace(SETTINGS, eager=True), torch.optim.Adam)
