"""A job of several ranks is one worker, however its model is wrapped, sharded or divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.protocol.messages import Settings, Submit
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.served_run import ServedRun
from tests.diloco.worker.crew import assert_close, sgd, small_model, trained_alone
from tests.support.forked_processes import Processes
from tests.support.small_models import Regression

JOBS = "tests.support.jobs.diloco_jobs"


def serve(model: nn.Module, sync_every: int = 2) -> DiLoCoServer:
    settings = Settings(num_workers=1, min_workers=1, sync_every=sync_every, codec="fp32")
    return DiLoCoServer(model, settings=settings, outer_optimizer_factory=sgd, port=0, token="secret")


def contributions(server: DiLoCoServer) -> int:
    with DiLoCoClient(server.address, token="secret") as client:
        return int(client.get_status()["counts"]["contributions"])


def tensors(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_are_one_worker_and_count_their_steps_once(
    kind: str, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submits: list[Submit] = []
    submit = ServedRun.submit
    monkeypatch.setattr(ServedRun, "submit", lambda *given: submits.append(given[1]) or submit(*given))
    with serve(small_model()) as server:
        settings = {"server": server.address, "id": kind, "kind": kind, "steps": 6}
        found = processes.results(JOBS, "train", tmp_path, settings, ranks=2)
        assert server.sync_round == 3
        assert contributions(server) == 3
    assert [(one.steps, one.tokens) for one in submits] == [(2, 4)] * 3, "the weight is that of both ranks"
    for rank in found:
        assert_close(tensors(rank["parameters"]), trained_alone(6), 1e-10)
        assert rank["step"] == [0, 3]


def test_chunks_of_a_model_are_one_worker(processes: Processes, tmp_path: Path) -> None:
    whole = small_model()
    chunks = {
        f"{index}.{name}": one
        for index, layer in ((0, whole[0]), (1, whole[2]))
        for name, one in layer.named_parameters()
    }
    with DiLoCoServer(
        {name: one.detach() for name, one in chunks.items()},
        settings=Settings(num_workers=1, min_workers=1, sync_every=2, codec="fp32"),
        outer_optimizer_factory=sgd,
        port=0,
        token="secret",
    ) as server:
        found = processes.results(JOBS, "chunks", tmp_path, {"server": server.address, "id": "c", "steps": 4}, ranks=1)
    expected = trained_alone(4)
    parameters = {
        name.replace("1.", "2.", 1) if name[0] == "1" else name: v for name, v in found[0]["parameters"].items()
    }
    assert_close(tensors(parameters), expected, 1e-10)


def test_all_ranks_learn_that_the_server_refused(processes: Processes, tmp_path: Path) -> None:
    with serve(small_model()) as server:
        found = processes.results(JOBS, "refused", tmp_path, {"server": server.address, "id": "r"}, ranks=2)
    assert found[0].startswith("main: ")
    assert found[1].startswith("follower: rank 0 failed: RefusedByServerError")
    assert all("0.bias" in one for one in found)


def test_the_trainer_with_two_ranks_is_one_worker(processes: Processes, tmp_path: Path) -> None:
    model = Regression()
    with serve(model, sync_every=3) as server:
        settings = {"server": server.address, "id": "t", "directory": str(tmp_path / "run")}
        found = processes.results(JOBS, "trainer", tmp_path, settings, ranks=2)
        assert contributions(server) == 2
        newest = server.get_global_params()
    assert found[0] == found[1]
    assert all(torch.equal(torch.tensor(found[0][name]), value) for name, value in newest.items())


def test_a_worker_resumes_on_more_ranks_than_it_was_saved_with(processes: Processes, tmp_path: Path) -> None:
    with serve(small_model()) as server:
        settings = {"server": server.address, "id": "w", "state": str(tmp_path / "state.pt")}
        processes.results(JOBS, "resume", tmp_path / "1", {**settings, "start": 0, "steps": 3, "saved": True}, ranks=1)
        more = {**settings, "start": 3, "steps": 7, "saved": False}
        found = processes.results(JOBS, "resume", tmp_path / "2", more, ranks=2)
        assert server.sync_round == 4
        assert contributions(server) == 4
    for rank in found:
        assert_close(tensors(rank), trained_alone(7), 1e-10)


def test_the_trainer_resumes_a_joiner_on_more_ranks_with_its_learning_rate(
    processes: Processes, tmp_path: Path
) -> None:
    with serve(Regression(), sync_every=3) as server:
        settings = {"server": server.address, "directory": str(tmp_path / "run")}
        first = {**settings, "id": "first", "directory": str(tmp_path / "first"), "crash_at": 6}
        (begun,) = processes.results(JOBS, "joiner", tmp_path / "1", first, ranks=1)
        (joined,) = processes.results(JOBS, "joiner", tmp_path / "2", {**settings, "id": "w", "crash_at": 4}, ranks=1)
        found = processes.results(JOBS, "joiner", tmp_path / "3", {**settings, "id": "w", "resume": True}, ranks=2)
    warmup_and_decay = [0.05 * step for step in range(2)] + [0.1 * (18 - step) / 16 for step in range(2, 18)]
    assert begun["rates"] == pytest.approx(warmup_and_decay[:6])
    assert joined["rates"] == pytest.approx(warmup_and_decay[6:10])
    for rank in found:
        assert rank["rates"] == pytest.approx(warmup_and_decay[9:])
    assert found[0] == found[1]
