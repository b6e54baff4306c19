"""Models that the user has wrapped or sharded: data-parallel ones are trained, and others are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.sharding_jobs"


@pytest.fixture(scope="module")
def single(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and norms of one process."""
    [found] = processes.results(JOBS, "train", tmp_path_factory.mktemp("single"), {"how": "ddp"}, ranks=1)
    return dict(found)


@pytest.mark.parametrize(("how", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_a_state_made_by_hand_has_the_ranks_of_its_process_group(
    processes: Processes, tmp_path: Path, single: dict[str, Any], how: str, ranks: int
) -> None:
    for found in processes.results(JOBS, "train", tmp_path, {"how": how}, ranks=ranks):
        assert found["ranks"] == ranks
        assert found["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(single["norms"], rel=1e-5)


def test_a_state_made_before_the_process_group_is_refused(processes: Processes, tmp_path: Path) -> None:
    errors = processes.results(JOBS, "early_state", tmp_path)
    assert all("made before the process group of 2 ranks" in error for error in errors), errors


@pytest.mark.parametrize("door", ["train", "train_step", "evaluate"])
@pytest.mark.parametrize(
    ("how", "ranks", "said"),
    [
        ("tp", 2, r"embed.weight is a DTensor on DeviceMesh((2,)"),
        ("fsdp x tp", 4, r"embed.weight is a DTensor on DeviceMesh((dp=2, tp=2)"),
        ("part", 4, r"embed.weight is a DTensor on DeviceMesh((dp=2)"),
    ],
)
def test_a_model_that_is_not_data_parallel_is_refused_by_name(
    processes: Processes, tmp_path: Path, door: str, how: str, ranks: int, said: str
) -> None:
    found = processes.results(JOBS, "train", tmp_path, {"how": how, "door": door}, ranks=ranks)
    assert all(said in one["error"] for one in found), found
    assert all(f"not data parallelism over all {ranks} ranks" in one["error"] for one in found), found


@pytest.mark.parametrize("door", ["train", "train_step", "evaluate"])
@pytest.mark.parametrize(
    ("how", "alone", "said"),
    [
        ("ddp", True, "averages gradients over 2 ranks, .* is trained as one of 1"),
        ("fsdp", True, "is a DTensor on .* not data parallelism over all 1 ranks"),
        ("ddp of one", False, "averages gradients over 1 ranks, .* is trained as one of 2"),
    ],
)
def test_a_model_that_exchanges_gradients_with_other_ranks_than_the_training_is_refused(
    processes: Processes, tmp_path: Path, door: str, how: str, alone: bool, said: str
) -> None:
    found = processes.results(JOBS, "train", tmp_path, {"how": how, "door": door, "alone": alone})
    assert all(re.search(said, one["error"]) for one in found), found


@pytest.mark.parametrize(
    ("how", "door", "said"),
    [
        ("tp", "train", "embed.weight is a DTensor on DeviceMesh((2,)"),
        ("tp", "evaluate", "embed.weight is a DTensor on DeviceMesh((2,)"),
        ("fsdp", "train", "pass it without fully_shard, or train it with onstep.training.train"),
    ],
)
def test_trainer_refuses_a_sharded_model_by_name(
    processes: Processes, tmp_path: Path, how: str, door: str, said: str
) -> None:
    errors = processes.results(JOBS, "trainer", tmp_path, {"how": how, "door": door})
    assert all(said in error for error in errors), errors


@pytest.mark.parametrize(
    ("how", "said"), [("tp", "which is not data parallelism over all 2 ranks"), ("fsdp", "pass it without fully_shard")]
)
def test_pretrain_refuses_a_model_that_a_hook_has_sharded(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path, how: str, said: str
) -> None:
    settings = {"how": how, "corpus": str(corpus), "cache": str(token_cache)}
    errors = processes.results(JOBS, "pretrain", tmp_path, settings)
    assert all(said in error for error in errors), errors


def test_a_certificate_has_the_shards_of_its_rank(processes: Processes, tmp_path: Path) -> None:
    first, second = processes.results(JOBS, "train", tmp_path, {"how": "fsdp", "certify": True})
    assert len(set(first["weights"])) == len(first["losses"]), "the shards change with each step"
    assert first["weights"] != second["weights"]


def test_a_ddp_whose_sums_change_after_a_resume_is_named(processes: Processes, tmp_path: Path) -> None:
    settings = {"how": "ddp", "save": "checkpoints"}
    said = {size: processes.results(JOBS, "train", tmp_path / str(size), settings, ranks=size) for size in (2, 3)}
    named = [any("onstep.distributed.data_parallel" in line for line in one["said"]) for one in said[3]]
    assert named == [True, False, False], "on rank 0"
    assert not any("data_parallel" in line for one in said[2] for line in one["said"]), "a + b is b + a"


def test_a_model_that_nothing_wraps_is_named_on_several_ranks(processes: Processes, tmp_path: Path) -> None:
    results = processes.results(JOBS, "train", tmp_path, {"how": "bare"})
    named = [any("not wrapped for data parallelism" in line for line in one["said"]) for one in results]
    assert named == [True, False]
