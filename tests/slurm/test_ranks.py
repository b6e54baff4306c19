"""The tasks of an `srun` step become ranks, unless a launcher has numbered them."""

from __future__ import annotations

import pytest

from onstep.slurm.ranks import adopt_ranks, first_host

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09],login1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
RANK = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"}


def test_a_task_of_a_step_is_a_rank() -> None:
    environment = dict(STEP)
    adopt_ranks(environment)
    assert environment == {**STEP, **RANK, "MASTER_ADDR": "gpu07", "MASTER_PORT": "27112"}


def test_an_address_that_is_set_is_kept() -> None:
    environment = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    adopt_ranks(environment)
    assert environment == {**STEP, **RANK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, id="torchrun inside srun"),
        pytest.param({"WORLD_SIZE": "1"}, id="runs of one rank each"),
        pytest.param({"SLURM_STEP_NUM_TASKS": "1"}, id="one task"),
        pytest.param({"SLURM_STEP_NUM_TASKS": ""}, id="the batch script itself"),
        pytest.param({"SLURM_STEP_NUM_TASKS": "many"}, id="not a number"),
    ],
)
def test_other_processes_stay_as_they_are(changed: dict[str, str]) -> None:
    environment = {**STEP, **changed}
    adopt_ranks(environment)
    assert environment == {**STEP, **changed}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("gpu[007-010,12],login1", "gpu007"),
        ("a1,b[1-2]", "a1"),
        ("rack[2,4]-n[01-16]", "rack2-n01"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
