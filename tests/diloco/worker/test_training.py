"""Small trainings by several processes learn what data-parallel training does; see `benchmarks/diloco_training.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.diloco.protocol.messages import Settings
from onstep.diloco.server import DiLoCoServer
from onstep.models import build_transformer
from tests.support.forked_processes import Processes, output_of
from tests.support.small_configs import small_pretrain_config

JOBS = "tests.support.jobs.diloco_jobs"
WORKERS, STEPS, EVERY, BATCH = 2, 60, 5, 4


@pytest.fixture(scope="module")
def data(corpus: Path, token_cache: Path) -> dict[str, Any]:
    return {"corpus": str(corpus), "cache": str(token_cache), "steps": STEPS}


@pytest.fixture(scope="module")
def reference(processes: Processes, data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> float:
    """The validation loss with the batch of all workers."""
    settings = {**data, "batch": BATCH * WORKERS}
    found = processes.results(JOBS, "pretrain", tmp_path_factory.mktemp("reference"), settings, ranks=1)
    return float(found[0]["loss"])


@pytest.mark.parametrize(
    ("codec", "limit"),
    [
        ("fp32", 1.02),
        pytest.param("bf16", 1.02, marks=pytest.mark.slow),
        pytest.param("int8", 1.02, marks=pytest.mark.slow),
        ("int4", 1.04),
    ],
)
def test_two_workers_learn_as_much_as_two_data_parallel_ranks(
    codec: str, limit: float, processes: Processes, data: dict[str, Any], reference: float, tmp_path: Path
) -> None:
    model = small_pretrain_config(data["corpus"], data["cache"], layers=2, width=32).model
    model.vocab_size = 257
    settings = Settings(num_workers=WORKERS, min_workers=WORKERS, sync_every=EVERY, codec=codec)
    with DiLoCoServer(build_transformer(model, seed=1234), settings=settings, port=0, token="secret") as server:
        workers = [
            processes.start(
                JOBS, "pretrain", tmp_path / name, {**data, "batch": BATCH, "server": server.address, "id": name}
            )[0]
            for name in ("one", "two")
        ]
        codes = [worker.wait(60) for worker in workers]
    assert codes == [0, 0], output_of(tmp_path / "one") + output_of(tmp_path / "two")
    found = [json.loads((tmp_path / name / "result-0.json").read_text()) for name in ("one", "two")]
    print(f"{codec}: {found[0]['loss']:.4f}, data parallel {reference:.4f}, ratio {found[0]['loss'] / reference:.4f}")
    assert found[0]["loss"] == found[1]["loss"]
    assert found[0]["loss"] <= limit * reference


def served(processes: Processes, data: dict[str, Any], directory: Path, *pieces: tuple[int, list[str]]) -> Any:
    """The parameters of a run with one worker that starts once for each piece, with that many ranks."""
    model = small_pretrain_config(data["corpus"], data["cache"], layers=2, width=32).model
    model.vocab_size = 257
    settings = Settings(num_workers=1, min_workers=1, sync_every=3, codec="int8")
    with DiLoCoServer(build_transformer(model, seed=1234), settings=settings, port=0, token="secret") as server:
        for ranks, keys in pieces:
            own = {**data, "steps": 12, "batch": 8, "server": server.address, "id": "one"}
            own["keys"] = [f"run.output_dir={directory}", "run.name=run", "train.micro_batch_size=4", *keys]
            processes.results(JOBS, "pretrain", directory / "ranks", own, ranks=ranks)
        return server.get_global_params()


def test_a_worker_may_have_stages_or_divided_tensors(
    processes: Processes, data: dict[str, Any], tmp_path: Path
) -> None:
    """One that stops between two rounds continues with what the codec has lost so far, on other ranks."""
    pp, tp = "parallel.pipeline_model_parallel_size=2", "parallel.tensor_model_parallel_size=2"
    one = served(processes, data, tmp_path / "one", (1, []))
    first, then = [pp, "train.exit_interval=8", "checkpoint.save_interval=8"], [tp, "parallel.sequence_parallel=true"]
    moved = served(processes, data, tmp_path / "moved", (2, first), (2, then))
    for name, value in one.items():
        assert torch.allclose(moved[name], value, rtol=0, atol=1e-4), (name, (moved[name] - value).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.pipeline_model_parallel_size=2"],
        ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
    ],
    ids=["pp2", "tp2 sp"],
)
def test_a_worker_of_several_ranks_that_stops_between_rounds_has_the_bits_of_one_that_does_not(
    processes: Processes, data: dict[str, Any], tmp_path: Path, layout: list[str]
) -> None:
    whole = served(processes, data, tmp_path / "whole", (2, layout))
    first = [*layout, "train.exit_interval=8", "checkpoint.save_interval=8"]
    stopped = served(processes, data, tmp_path / "stopped", (2, first), (2, layout))
    for name, value in whole.items():
        assert torch.equal(stopped[name], value), name
