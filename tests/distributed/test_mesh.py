"""The axes along which ranks lie, and the ranks with different samples."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onstep.config import DistributedInitConfig
from onstep.distributed import ParallelSizes, World, open_world
from onstep.errors import ConfigError
from tests.support.forked_processes import Processes

JOBS = "tests.support.jobs.world_jobs"


def test_by_default_every_rank_has_samples_of_its_own() -> None:
    world = World(rank=2, size=3)
    assert (world.data.rank, world.data.size) == (2, 3)
    assert world.sizes == ParallelSizes(dp_replicate=3)
    assert world.place() == "rank 2"
    assert world.place(0) == "rank 0"


def test_a_world_of_one_has_all_axes_on_the_group_that_it_has() -> None:
    with closing(open_world(DistributedInitConfig(device="cpu"))) as world:
        assert dict(zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True)) == {
            "pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1,
        }  # fmt: skip
        assert world.expert_mesh.shape == (1, 1, 1, 1)
        assert {world.group(axis) for axis in world.mesh.mesh_dim_names or ()} == {dist.group.WORLD}
        assert world.data.sum(torch.ones(2)).tolist() == [1, 1]
        assert world.data.gather("mine") == ["mine"]
    assert not dist.is_initialized()


def test_places_are_told_from_the_nearest_axis_to_the_farthest() -> None:
    world = World(rank=5, size=12, sizes=ParallelSizes(dp_replicate=3, dp_shard=2, tp=2))
    assert world.place() == "rank 5, tp 1, dp_shard 0, dp_replicate 1"
    assert world.place(11) == "rank 11, tp 1, dp_shard 1, dp_replicate 2"
    assert (world.data.rank, world.data.size) == (2, 6)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (ParallelSizes(tp=2), r"pp 1 \* dp_replicate 1 \* dp_shard 1 \* cp 1 \* tp 2 = 2 must be .* got 4; .*start 2"),
        (ParallelSizes(tp=-4, cp=-1), r"at least 1, got .*tp=-4"),
        (ParallelSizes(dp_shard=2, tp=2, ep=4), r"dp_replicate \* dp_shard \* cp = 2 must be a multiple of ep 4"),
    ],
)
def test_sizes_that_do_not_make_up_the_ranks_are_refused_before_there_is_a_group(
    monkeypatch: pytest.MonkeyPatch, sizes: ParallelSizes, says: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=says):
        open_world(DistributedInitConfig(device="cpu"), sizes)
    assert not dist.is_initialized()


def test_a_world_without_its_process_group_has_no_mesh() -> None:
    with pytest.raises(ConfigError, match=r"has 0, but this world has 1; use the world that open_world returns"):
        _ = World().mesh


@pytest.mark.distributed
def test_ranks_with_the_same_samples_count_once(processes: Processes, tmp_path: Path) -> None:
    first, second = processes.results(JOBS, "shares", tmp_path / "2", {"sizes": {"tp": 2}})
    assert first | {"place": ""} == second | {"place": "", "sum": 1, "sum_losses": 1, "max": 1}
    assert (second["data"], second["sum"], second["gathered"], second["numbers"]) == ([0, 1], 2, [0], [[0]])
    assert (second["all"], second["place"], second["groups"]) == (3, "rank 1, tp 1", 1)

    four = processes.results(JOBS, "shares", tmp_path / "4", {"sizes": {"dp_shard": 2, "tp": 2}}, ranks=4)
    assert [one["data"] for one in four] == [[0, 2], [0, 2], [1, 2], [1, 2]]
    assert [one["sum"] for one in four] == [1 + 3, 2 + 4, 1 + 3, 2 + 4]
    assert [one["max"] for one in four] == [3, 4, 3, 4]
    assert [one["gathered"] for one in four] == [[0, 2]] * 4
    assert [one["numbers"] for one in four] == [[[0], [2]]] * 4

    context = processes.results(JOBS, "shares", tmp_path / "cp", {"sizes": {"dp_shard": 2, "cp": 2}}, ranks=4)
    assert [one["sum"] for one in context] == [1 + 3, 2 + 4, 1 + 3, 2 + 4]
    assert [one["sum_losses"] for one in context] == [10] * 4


@pytest.mark.distributed
def test_with_data_parallelism_alone_no_further_group_is_made_for_its_sums(
    processes: Processes, tmp_path: Path
) -> None:
    results = processes.results(JOBS, "shares", tmp_path, {"sizes": {"dp_replicate": 3}}, ranks=3)
    assert [one["data"] for one in results] == [[0, 3], [1, 3], [2, 3]]
    assert [(one["sum"], one["sum_losses"], one["max"]) for one in results] == [(6, 6, 3)] * 3
    assert [one["gathered"] for one in results] == [[0, 1, 2]] * 3
    assert [one["groups"] for one in results] == [1] * 3


@pytest.mark.distributed
def test_axes_have_the_groups_of_their_ranks_until_the_world_closes(processes: Processes, tmp_path: Path) -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "ep": 2}
    results = processes.results(JOBS, "axes", tmp_path / "hsdp", {"sizes": sizes}, ranks=4)
    last = results[3]["along"]
    assert (last["dp_replicate"], last["dp_shard"], last["tp"], last["pp"]) == ([1, 3], [2, 3], [3], [3])
    assert (last["expt_dp"], last["ep"], last["expt_tp"], last["mp"]) == ([1, 3], [2, 3], [3], [3])
    assert [one["hybrid"] for one in results] == [[[0, 1], [2, 3]]] * 4
    assert [one["groups"] for one in results] == [[1, 4, 1]] * 4  # beside the default group: two axes, and oneself

    [first, _] = processes.results(JOBS, "axes", tmp_path / "dp", {"sizes": {"dp_replicate": 2}})
    assert first["along"]["dp_replicate"] == [0, 1]
    assert first["groups"] == [1, 2, 1]


@pytest.mark.distributed
def test_a_later_world_of_the_same_processes_finds_its_own_groups(processes: Processes, tmp_path: Path) -> None:
    sums = processes.results(JOBS, "reopened", tmp_path, {"sizes": {"dp_shard": 2, "tp": 2}}, ranks=4)
    assert sums == [[4, 4, 4], [6, 6, 6], [4, 4, 4], [6, 6, 6]]
