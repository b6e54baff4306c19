"""Saves of two real ranks: one outcome for both, whatever fails on one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import CheckpointManager, verify
from onstep.distributed import World
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.checkpoint_jobs"
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def results(processes: Processes, directory: Path) -> Results:
    """What both ranks met in the jobs that end well."""
    return processes.results(JOBS, "together", directory)


def test_each_pattern_is_written_by_one_rank_of_those_that_share_it_and_read_by_all(results: Results) -> None:
    for rank, result in enumerate(one["patterns"] for one in results):
        assert (result["told"], result["step"], result["other_ranks"]) == ([1, 2], 2, False)
        assert result["loaded"] == {
            "shared": [7, 0],
            "replica": [7, 0],
            "rank": [7, rank],
            "node": [7, rank],
            "pair": [7, 0],
            "own": [7, rank],
        }
        alone, both = [0], [0, 1]
        assert result["ranks"] == {
            "shared": alone,
            "replica": alone,
            "rank": both,
            "node": both,
            "pair": alone,
            "own": both,
        }
    files = [
        *("node/node_0.json", "node/node_1.json", "own/group_own_0.json", "own/group_own_1.json"),
        *("pair/group_pair_0.json", "rank/rank_0.json", "rank/rank_1.json", "replica/state.json", "shared/state.json"),
    ]
    assert [one["patterns"]["files"] for one in results] == [files, files]


def test_what_fails_on_one_rank_fails_on_all_and_nothing_is_committed(results: Results) -> None:
    for result in [one["failures"] for one in results]:
        for name in ("disk, async False", "disk, async True"):
            assert result[name].startswith("CheckpointError: Saving the checkpoint of step 2 failed: rank 1: write of")
            assert "rank_1.safetensors failed: No space left on device" in result[name]
        assert result["continue"] == "saved", "a run that continues is only warned"
        assert "failed: rank 1: RuntimeError: no state today" in result["state"]
        assert result["keys"].startswith("ConfigError")
        assert "rank 1: 2 components have the key 'a'" in result["keys"]
        assert result["group"].startswith("ConfigError")
        assert "'dp' must be a group of this run (none)" in result["group"]
        assert "Loading 'a'" in result["load"]
        assert "rank 1: RuntimeError: no state today" in result["load"]
        for name in ("disk, async False", "disk, async True", "continue", "state", "keys", "group"):
            assert (result[f"{name}: steps"], result[f"{name}: debris"]) == ([1], []), name
        assert (result["optional"], result["optional: steps"]) == ("saved", [2, 1])
        assert result["optional: ranks"] == [0], "what an optional component has on other ranks is saved"


def test_replicas_that_differ_are_refused_on_all_ranks_with_the_first_path(results: Results) -> None:
    for result in [one["replication"] for one in results]:
        refused = {name: text for name, text in result.items() if text != "None"}
        assert sorted(refused) == ["no form-full", "tensor-full", "tensor-tensor", "value-full"]
        assert "rank 1: " in refused.pop("no form-full")
        for text in refused.values():
            assert "'model' is REPLICATED, but differs between rank 0 and rank 1" in text
        assert "first at model.layers[0].w:" in refused["tensor-tensor"]
        assert "first at model.lr:" in refused["value-full"]


@pytest.mark.parametrize(("rank", "kind"), [(1, "write"), (0, "rename")])
def test_a_rank_killed_in_a_save_costs_that_save_only(
    processes: Processes, rank: int, kind: str, tmp_path: Path
) -> None:
    codes = processes.run(JOBS, "two_saves", tmp_path, {"rank": rank, "kind": kind}, ranks=2)
    assert codes[rank] == -signal.SIGKILL
    root = tmp_path / "c"
    assert verify(root / "checkpoint-1").step == 1
    assert not (root / "checkpoint-2").exists()
    assert any(path.name.startswith(".tmp-checkpoint-2-") for path in root.iterdir())

    info = CheckpointManager(root, World()).newest()
    assert info is not None
    assert info.step == 1
    assert sorted(os.listdir(root)) == ["checkpoint-1", "latest"]


def test_on_more_ranks_those_without_a_state_of_their_own_are_reported(
    processes: Processes, results: Results, directory: Path
) -> None:
    for rank, result in enumerate(processes.results(JOBS, "resumed", directory, ranks=3)):
        assert (result["step"], result["model"]) == (2, [2.0] * 10)
        has_own = rank < 2
        assert (result["rng"], result["other"]) == ({"rank": rank, "step": 2} if has_own else {}, not has_own)
