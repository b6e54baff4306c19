"""Models that the user has wrapped or sharded: data-parallel ones are trained, and others are refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.sharding_jobs"
DOORS = ["evaluate", "train", "train_step"]


@pytest.fixture(scope="module")
def single(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and norms of one process."""
    [found] = processes.results(JOBS, "train", tmp_path_factory.mktemp("single"), {"how": "ddp"}, ranks=1)
    return dict(found)


@pytest.mark.parametrize(("how", "ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp summed", 2), ("hsdp", 4)])
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_worlds_and_loaders_of_other_ranks_are_refused_on_all_ranks(
    processes: Processes, tmp_path: Path, ranks: int
) -> None:
    said = {
        "rank 0 twice": rf"the world is rank 0 of {ranks}, but this process is rank [12] of the {ranks} of",
        "more ranks": rf"the world is rank \d of {ranks + 1}, but this process is rank \d of the {ranks} of",
        "all samples": rf"TrainLoader reads the samples of rank 0 of 1, but is read by rank \d of {ranks}",
        "samples of rank 0": rf"TrainLoader reads the samples of rank 0 of {ranks}, but is read by rank [12] of",
        "evaluated by rank 0": rf"EvalLoader reads the samples of rank 0 of 1, but is read by rank \d of {ranks}",
        "no group": rf"rank \d of {2 * ranks}, but there is no process group; pass world=open_world",
        "no world": rf"WORLD_SIZE says that {ranks} ranks were started, but there is no process group",
    }
    alone = processes.results(JOBS, "refusals", tmp_path / "alone", {"has_group": False}, ranks=ranks)
    grouped = alone if ranks == 1 else processes.results(JOBS, "refusals", tmp_path, {"has_group": True}, ranks=ranks)
    for found in map(dict[str, str].__or__, alone, grouped):
        assert sorted(found) == (["no group"] if ranks == 1 else sorted(said))
        for case, error in found.items():
            assert error is not None, case
            assert re.search(said[case], error), error


def test_parameters_outside_of_what_averages_gradients_are_refused_by_name(
    processes: Processes, tmp_path: Path
) -> None:
    alone = r"each rank would train 1 of 3 parameters by itself \(embed.weight\)"
    said = dict.fromkeys(("ddp of a part", "fsdp of a part", "fsdp but for one"), alone)
    said["fsdp summed in part"] = (
        "fully_shard divides those of .* by [12] and .* by [12]; call set_gradient_divide_factor"
    )
    said["first fsdp"] = "the model is in FullyShardedDataParallel, .* use torch.distributed.fsdp.fully_shard"
    for found in processes.results(JOBS, "left_alone", tmp_path):
        assert sorted(found) == sorted(said)
        assert all(re.search(said[how], error) for how, error in found.items()), found


def test_a_hook_may_average_what_a_wrapper_leaves_out(
    processes: Processes, tmp_path: Path, single: dict[str, Any]
) -> None:
    for found in processes.results(JOBS, "train", tmp_path, {"how": "ddp of a part, averaged"}):
        assert found["losses"] == pytest.approx(single["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(single["norms"], rel=1e-5)


@pytest.mark.parametrize(
    ("how", "ranks", "said"),
    [
        ("tp", 2, "embed.weight is a DTensor on DeviceMesh((2,), 'cpu', stride=(1,)) with placements (Shard(dim=0),)"),
        ("fsdp x tp", 4, "embed.weight is a DTensor on DeviceMesh((dp=2, tp=2)"),
        ("part", 4, "embed.weight is a DTensor on DeviceMesh((dp=2)"),
    ],
)
def test_a_model_that_is_not_data_parallel_is_refused_by_name(
    processes: Processes, tmp_path: Path, how: str, ranks: int, said: str
) -> None:
    for found in processes.results(JOBS, "doors", tmp_path, {"how": how, "alone": False}, ranks=ranks):
        assert sorted(found) == DOORS
        assert all(said in error for error in found.values()), found
        assert all(f"not data parallelism over all {ranks} ranks" in error for error in found.values()), found


@pytest.mark.parametrize(
    ("how", "alone", "said"),
    [
        ("ddp", True, "averages gradients over 2 ranks, .* is trained as one of 1"),
        ("fsdp", True, "is sharded by fully_shard over 2 ranks, but its world is this rank alone"),
        ("ddp of one", False, "averages gradients over 1 ranks, .* is trained as one of 2"),
    ],
)
def test_a_model_that_exchanges_gradients_with_other_ranks_than_the_training_is_refused(
    processes: Processes, tmp_path: Path, how: str, alone: bool, said: str
) -> None:
    for found in processes.results(JOBS, "doors", tmp_path, {"how": how, "alone": alone}):
        assert sorted(found) == DOORS
        assert all(re.search(said, error) for error in found.values()), found


@pytest.mark.parametrize(
    ("how", "door", "said"),
    [
        ("tp", "train", "embed.weight is a DTensor on DeviceMesh((2,)"),
        ("tp", "evaluate", "embed.weight is a DTensor on DeviceMesh((2,)"),
        ("fsdp", "train", "pass it without fully_shard, or train it with onstep.training.train"),
        ("first fsdp", "train", "the model is in FullyShardedDataParallel"),
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


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_no_samples_are_blamed_for_a_bad_gradient_that_ranks_have_exchanged(
    processes: Processes, tmp_path: Path, how: str
) -> None:
    for error in processes.results(JOBS, "checked", tmp_path, {"how": how}):
        assert "is nan on rank 1, perhaps by samples of other ranks" in error
        assert "sample ids" not in error


@pytest.mark.parametrize(("how", "ranks"), [("fsdp", 3), ("hsdp", 4)])
def test_a_certificate_of_shards_is_one_chain(processes: Processes, tmp_path: Path, how: str, ranks: int) -> None:
    found = processes.results(JOBS, "train", tmp_path, {"how": how, "certify": True}, ranks=ranks)
    records = found[0]["chain"]
    assert all(one["chain"] == records for one in found)
    assert len({record["weights"] for record in records}) == len(found[0]["losses"]), "they change with each step"


def test_a_ddp_whose_sums_change_after_a_resume_is_named(processes: Processes, tmp_path: Path) -> None:
    settings = {"how": "ddp", "save": "checkpoints"}
    said = {size: processes.results(JOBS, "train", tmp_path / str(size), settings, ranks=size) for size in (2, 3)}
    named = [any("onstep.distributed.data_parallel" in line for line in one["said"]) for one in said[3]]
    assert named == [True, False, False], "on rank 0"
    assert not any("data_parallel" in line for one in said[2] for line in one["said"]), "a + b is b + a"


def test_a_model_that_nothing_wraps_is_refused_on_several_ranks_once_their_weights_differ(
    processes: Processes, tmp_path: Path
) -> None:
    results = processes.results(JOBS, "train", tmp_path, {"how": "bare"})
    named = [any("not wrapped for data parallelism" in line for line in one["said"]) for one in results]
    assert named == [True, False]
    for one in results:
        assert one["error"].startswith("each of the 2 ranks trains a model of its own: it is not wrapped"), one
        assert "after the first step rank 1 differs in embed.weight" in one["error"]
        assert len(one["losses"]) == 1
    for one in processes.results(JOBS, "train", tmp_path / "averaged", {"how": "averaged"}):
        assert one["error"] == ""
