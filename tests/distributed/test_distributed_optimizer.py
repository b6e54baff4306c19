"""Ranks that divide the updates of an optimizer, beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.divided_jobs"


@pytest.mark.parametrize(("ranks", "bucket"), [(2, 1), (3, 10**6)])
def test_updates_in_parts_are_those_of_one_process(
    processes: Processes, tmp_path: Path, ranks: int, bucket: int
) -> None:
    settings = {"bucket": bucket, "ddp": {}}
    [alone] = processes.results(JOBS, "steps", tmp_path / "one", settings, ranks=1)
    found = processes.results(JOBS, "steps", tmp_path / "several", settings, ranks=ranks)
    for one in found:
        assert one["norms"] == found[0]["norms"]  # to the bit
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        for own, expected in zip(one["weights"], alone["weights"], strict=True):
            assert own == pytest.approx(expected, abs=1e-5)
    assert sum(one["state"] for one in found) == alone["state"]


@pytest.mark.parametrize("megabytes", [1e-5, 9e-5, 2e-4])  # a bucket for each parameter, each large one, and several
def test_overlap_changes_no_bit_and_no_module_reads_a_parameter_before_it_is_gathered(
    processes: Processes, tmp_path: Path, megabytes: float
) -> None:
    for plain, sums, both, evaluated in processes.results(JOBS, "overlaps", tmp_path, {"megabytes": megabytes}):
        assert plain["begun"] == 0
        assert sums["begun"] == both["begun"] == 4 * sums["buckets"]
        assert plain["losses"] == sums["losses"] == both["losses"]
        assert plain["weights"] == sums["weights"] == both["weights"] == evaluated["weights"]
        assert [one for one in evaluated["losses"] if one in plain["losses"]] == plain["losses"]
        assert both["order"][0] >= both["buckets"] - 2, "the first layers come first"
        assert plain["largest shared"] < megabytes * 2**20 / 4, "large ones are by themselves"
        assert both["order"] == evaluated["order"]


def test_ranks_agree_while_gathers_are_in_flight(processes: Processes, tmp_path: Path) -> None:
    assert processes.results(JOBS, "waiting", tmp_path, ranks=2) == [[0, 1], [0, 1]]


def test_hooks_that_are_on_or_off_already_and_a_second_backward_pass_are_refused(
    processes: Processes, tmp_path: Path
) -> None:
    for said in processes.results(JOBS, "hooks", tmp_path, ranks=2):
        off, number, on, again = said
        assert "off already" in off
        assert number == "5 hooks"
        assert "on already" in on
        assert "got another gradient after its sum" in again
        assert "ddp.overlap_grad_reduce=false" in again


def test_norms_of_gradients_are_those_of_whole_ones_and_a_nan_of_one_rank_stops_the_update_of_all(
    processes: Processes, tmp_path: Path
) -> None:
    """A NaN in the loss of a rank, and one in its rows of the sum only."""
    [alone] = processes.results(JOBS, "norms", tmp_path / "one", ranks=1)
    for found in processes.results(JOBS, "norms", tmp_path / "two"):
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        assert found["kept"]
        assert found["applied"] == [False, False]


def test_a_second_training_of_a_trainer_continues_with_the_state(processes: Processes, tmp_path: Path) -> None:
    flags = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    replicas, divided = (
        processes.results(JOBS, "twice", tmp_path / name, {"keys": keys})[0]
        for name, keys in (("ddp", {}), ("divided", {f"ddp.{flag}": True for flag in flags}))
    )
    for expected, found in zip(replicas, divided, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "joins", [pytest.param(False, marks=pytest.mark.slow), True], ids=["own group", "group of the script"]
)
def test_a_model_in_replicas_of_shards_is_evaluated_and_saved_after_a_second_training(
    processes: Processes, tmp_path: Path, joins: bool
) -> None:
    sizes = {"parallel.data_parallel_replicate_size": 2, "parallel.data_parallel_shard_size": 2}
    keys = {**sizes, "fsdp.wrap": ["Linear"]}
    first, second, [evaluated] = processes.results(
        JOBS, "twice", tmp_path, {"keys": keys, "saves": True, "joins": joins}, ranks=4
    )[0]
    assert second[-1] < evaluated < first[0]


@pytest.mark.parametrize("how", ["divided", "sharded", pytest.param("in twos", marks=pytest.mark.slow)])
def test_a_second_training_of_a_process_has_the_groups_of_its_own_world(
    processes: Processes, tmp_path: Path, how: str
) -> None:
    """With Muon, which exchanges rows within the groups of the mesh that DTensors have; two replicas in two parts."""
    keys = {
        "divided": ["ddp.use_distributed_optimizer=true", "ddp.num_distributed_optimizer_instances=2"],
        "sharded": ["parallel.data_parallel_replicate_size=2", "parallel.data_parallel_shard_size=2"],
        "in twos": ["parallel.data_parallel_shard_size=4", "fsdp.reshard_after_forward=2"],
    }[how]
    if how == "divided":
        keys += ["ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"]
    for found in processes.results(JOBS, "again", tmp_path, {"keys": keys}, ranks=4):
        for in_one, in_two in zip(found["trained"][::2], found["trained"][1::2], strict=True):
            assert len(in_two[0]) == 4
            assert in_two == in_one
        if how == "sharded":
            assert "an earlier training has divided the model over DeviceMesh" in found["refused"]
            assert "build the model again" in found["refused"]
