"""Saves of two real ranks: one outcome for both, whatever fails on one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import CheckpointManager, verify
from onstep.distributed import World

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("checkpoint_rank_script.py")


Results = list[dict[str, Any]]


def launch(ranks: int, job: str, folder: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [str(SCRIPT), job, str(folder), json.dumps(settings)]
    return subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=120, check=False)


def run_ranks(ranks: int, job: str, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """What each rank found, in rank order."""
    done = launch(ranks, job, folder, **settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    """What both ranks met in the jobs that end well."""
    return run_ranks(2, "together", folder)


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
            assert "'model' is REPLICATED, but not the same on rank 0 and on rank 1" in text
        assert "first at model.layers[0].w:" in refused["tensor-tensor"]
        assert "first at model.lr:" in refused["value-full"]


@pytest.mark.parametrize(("rank", "kind"), [(1, "write"), (0, "rename")])
def test_a_rank_killed_in_a_save_costs_that_save_only(rank: int, kind: str, tmp_path: Path) -> None:
    done = launch(2, "two_saves", tmp_path, rank=rank, kind=kind)
    assert "Signal 9 (SIGKILL)" in done.stderr
    root = tmp_path / "c"
    assert verify(root / "checkpoint-1").step == 1
    assert not (root / "checkpoint-2").exists()
    assert any(path.name.startswith(".tmp-checkpoint-2-") for path in root.iterdir())

    info = CheckpointManager(root, World()).newest()
    assert info is not None
    assert info.step == 1
    assert sorted(os.listdir(root)) == ["checkpoint-1", "latest"]


def test_on_more_ranks_those_without_a_state_of_their_own_are_told(results: Results, folder: Path) -> None:
    for rank, result in enumerate(run_ranks(3, "resumed", folder)):
        assert (result["step"], result["model"]) == (2, [2.0] * 10)
        has_own = rank < 2
        assert (result["rng"], result["other"]) == ({"rank": rank, "step": 2} if has_own else {}, not has_own)
