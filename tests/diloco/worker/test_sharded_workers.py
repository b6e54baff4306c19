"""Workers whose ranks divide a model, or its updates, are as workers of one process, also with other ranks later."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.diloco.codec.body import write_body
from onstep.diloco.outer import nesterov_sgd
from onstep.diloco.protocol.messages import Settings, Submit
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.served_run import ServedRun
from tests.support.forked_processes import Processes, output_of
from tests.support.small_models import TokenModel

JOBS = "tests.support.jobs.site_jobs"
ONE = [("one", 1)]
STEPS, EVERY, SAVED = 6, 2, 3
"""Of a worker with two lives, between two rounds, and between two checkpoints, after which a worker dies."""
Lives = list[tuple[str, int]]
"""The layout and the number of ranks of a worker, of each of its lives; all but the last end by SIGKILL."""


class Bodies:
    """The bodies that the server got, by worker and sequence number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[tuple[str, int], bytes] = {}
        submit = ServedRun.submit

        def noted(run: ServedRun, request: Submit, encoded: Mapping[str, Tensor], *rest: Any) -> Any:
            self.of[request.worker_id, request.sequence] = write_body(encoded)
            return submit(run, request, encoded, *rest)

        monkeypatch.setattr(ServedRun, "submit", noted)


def train(
    processes: Processes, directory: Path, codec: str, lives: dict[str, Lives], steps: int = STEPS
) -> dict[str, list[Any]]:
    """What the ranks of each worker's last life returned."""
    settings = Settings(num_workers=len(lives), min_workers=len(lives), sync_every=EVERY, codec=codec)
    with DiLoCoServer(
        TokenModel(dtype=torch.float64),
        settings=settings,
        outer_optimizer_factory=nesterov_sgd,
        port=0,
        token="secret",
    ) as server:
        running = {name: _start(processes, directory, server.address, name, lives[name], 0, steps) for name in lives}
        for life in range(1, max(map(len, lives.values()))):  # all die at the same step, as a round requires all
            for name, own in lives.items():
                if life < len(own):
                    assert running[name][-1].wait() == -signal.SIGKILL
                    for child in running[name][:-1]:
                        child.send_signal(signal.SIGKILL)
                        child.wait()
                    running[name] = _start(processes, directory, server.address, name, own, life, steps)
        for name, children in running.items():
            folder = directory / f"{name}-{len(lives[name]) - 1}"
            assert [child.wait() for child in children] == [0] * len(children), output_of(folder)
    return {name: _results(directory / f"{name}-{len(own) - 1}", own[-1][1]) for name, own in lives.items()}


def _start(
    processes: Processes, directory: Path, server: str, name: str, lives: Lives, life: int, steps: int
) -> list[Any]:
    layout, ranks = lives[life]
    settings = {"server": server, "id": name, "layout": layout, "steps": steps, "directory": str(directory / name)}
    if life + 1 < len(lives):
        settings["dies_at"] = SAVED * (life + 1)
    if life:
        settings["resume"] = True
    folder = directory / f"{name}-{life}"
    children = processes.start(JOBS, "site", folder, settings, ranks=ranks)
    deadline = time.monotonic() + 60
    while not (folder / f"joined-{name}-0").exists():  # so that the workers have the same shares of the data each time
        assert time.monotonic() < deadline, output_of(folder)
        time.sleep(0.02)
    return children


def _results(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(ranks)]


def check(
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    lives: dict[str, Lives],
    steps: int = STEPS,
) -> dict[str, list[Any]]:
    """Compare workers with those of one process each that nothing interrupts: what they send, and the model."""
    bodies = Bodies(monkeypatch)
    expected = train(processes, tmp_path / "one", codec, dict.fromkeys(lives, ONE), steps)
    reference, bodies.of = bodies.of, {}
    found = train(processes, tmp_path / "many", codec, lives, steps)
    assert Counter(name for name, _ in bodies.of) == dict.fromkeys(lives, steps // EVERY)
    for key, body in reference.items():
        assert len(bodies.of[key]) == len(body)
        if codec == "int8":  # which the last bits of float64 do not reach
            assert bodies.of[key] == body, key
    for ranks in found.values():
        for rank in ranks:
            for name, value in next(iter(expected.values()))[0]["parameters"].items():
                torch.testing.assert_close(_tensor(rank["parameters"][name]), _tensor(value), rtol=0, atol=1e-9)
    return found


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_killed_workers_come_back_on_other_ranks_with_their_residuals(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: dict[str, Lives] = {"a": [("fsdp2", 2), ("distopt", 3)], "b": [("distopt", 2), ("one", 1)]}
    found = check(processes, tmp_path, monkeypatch, "int8", lives)
    rows = {"embedding.weight": 23, "head.weight": 23, "head.bias": 23}
    columns = {"embedding.weight": 8, "head.weight": 8, "head.bias": 1}
    for rank, result in enumerate(found["a"]):
        first = {name: min(8 * rank, size) for name, size in rows.items()}
        own = sum((min(8, rows[name] - first[name])) * columns[name] for name in rows)
        assert result["held"][-1] == {"base": 8 * own, "submitted": 0, "residuals": 8 * own, "before": 8 * own}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize(
    "lives",
    [
        {"a": [("one", 1), ("fsdp2", 2), ("distopt", 3)], "b": [("ddp", 2), ("distopt", 2), ("one", 1)]},
        {"a": [("distopt", 3), ("one", 1), ("fsdp2", 2)], "b": [("fsdp2", 3), ("ddp", 2), ("fsdp2", 2)]},
    ],
    ids=["growing and shrinking", "shrinking and growing"],
)
def test_workers_with_three_lives_each(
    codec: str, lives: dict[str, Lives], processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(processes, tmp_path, monkeypatch, codec, lives, steps=8)


def test_a_nan_in_one_ranks_shard_is_raised_on_all_and_costs_no_residual(processes: Processes, tmp_path: Path) -> None:
    settings = Settings(num_workers=1, min_workers=1, sync_every=1, codec="int8")
    with DiLoCoServer(
        TokenModel(), settings=settings, outer_optimizer_factory=nesterov_sgd, port=0, token="secret"
    ) as server:
        found = processes.results(JOBS, "poisoned", tmp_path, {"server": server.address}, ranks=2)
    assert found[0]["raised"].startswith("InvalidTensorsError: embedding.weight: it has elements that are NaN"), found
    assert found[1]["raised"].startswith("MainRankError: rank 0 failed: InvalidTensorsError: embedding.weight"), found
    assert all(one["kept"] for one in found)
