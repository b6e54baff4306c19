"""Runs whose checkpoints are in shards: resumed to the bit on their layout, and on others; killed at any point."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import checkpoints, verify
from tests.support.forked_processes import Processes, output_of

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.shard_run_jobs"
RANKS = {"bare": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}
STEPS = 6


@pytest.fixture(scope="module")
def untouched(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two ranks that nobody stops, and what it computes."""
    directory = tmp_path_factory.mktemp("untouched")
    settings = {"how": "fsdp", "steps": STEPS, "averages": True, "validates": True}
    return directory, processes.results(JOBS, "run", directory, settings)[0]


def until(step: int, run: Path, directory: Path) -> Path:
    """The run as it was at a step, in another directory."""
    shutil.copytree(run, directory)
    for info in checkpoints(directory / "checkpoints"):
        if info.step > step:
            shutil.rmtree(info.path)
    return directory


@pytest.mark.parametrize(("how", "ranks"), [("fsdp", 2), ("bare", 1), ("fsdp", 3)])
def test_a_run_continues_on_its_layout_and_on_others(
    processes: Processes, tmp_path: Path, untouched: tuple[Path, dict[str, Any]], how: str, ranks: int
) -> None:
    directory, whole = until(2, untouched[0], tmp_path / "run"), untouched[1]
    settings = {"how": how, "steps": STEPS, "averages": True, "seed": 1, "async": ranks == 2}
    for found in processes.results(JOBS, "run", directory, settings, ranks=ranks):
        if (how, ranks) == ("fsdp", 2):
            assert found == {**whole, "losses": whole["losses"][2:], "norms": whole["norms"][2:]}
            assert len(found["averages"]) == 3
        assert found["losses"] == pytest.approx(whole["losses"][2:], rel=1e-5)
        assert found["norms"] == pytest.approx(whole["norms"][2:], rel=1e-5)


def killed(processes: Processes, directory: Path, how: str, rank: int, at: list[Any]) -> None:
    """A part of a run in which a rank is killed at a file operation; the last checkpoint stays whole."""
    before = [info.step for info in checkpoints(directory / "checkpoints")]
    settings = {"how": how, "steps": STEPS, "averages": True, "async": True, "killed": rank, "at": at}
    codes = processes.run(JOBS, "run", directory, settings, ranks=RANKS[how])
    assert -9 in codes, (at, codes, output_of(directory))
    there = [info.step for info in checkpoints(directory / "checkpoints")]
    assert set(before) <= set(there), at
    for info in checkpoints(directory / "checkpoints"):
        verify(info.path)


def test_a_run_that_is_killed_within_saves_and_between_write_and_commit_ends_as_the_untouched_one(
    processes: Processes, tmp_path: Path, untouched: tuple[Path, dict[str, Any]]
) -> None:
    directory, whole = tmp_path / "run", untouched[1]
    killed(processes, directory, "fsdp", 1, ["write", "rank_1", 5])
    killed(processes, directory, "fsdp", 0, ["open", "manifest", 1])
    settings = {"how": "fsdp", "steps": STEPS, "averages": True, "seed": 2}
    [found, _] = processes.results(JOBS, "run", directory, settings)
    assert found["digests"] == whole["digests"]
    assert found["losses"] == whole["losses"][-len(found["losses"]) :]
    assert len(found["losses"]) < STEPS


POINTS = [["write", "rank_", 24], ["open", "manifest", 3], ["rename", ".tmp-checkpoint", 3], ["load", "", 12]]
"""Where ranks are killed: the operation, its file, and how many such there are at most before."""
KILLS = 60


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["ddp", "fsdp", "hsdp"])
def test_a_storm_of_kills_changes_nothing(processes: Processes, tmp_path: Path, how: str) -> None:
    ranks, pick, directory = RANKS[how], random.Random(how), tmp_path / "run"
    [whole, *_] = processes.results(JOBS, "run", tmp_path / "whole", {"how": how, "steps": STEPS}, ranks=ranks)
    kills: Counter[str] = Counter()
    while kills.total() < KILLS:
        kind, name, most = POINTS[(kills.total() + pick.randrange(2)) % len(POINTS)]
        rank = 0 if kind in ("open", "rename") else pick.randrange(ranks)
        there = checkpoints(directory / "checkpoints")
        settings = {"how": how, "steps": STEPS, "async": pick.random() < 0.7, "killed": rank}
        settings |= {"at": [kind, name, pick.randrange(most)], "seed": 2 if there else 0}
        codes = processes.run(JOBS, "run", directory, settings, ranks=ranks)
        for info in checkpoints(directory / "checkpoints"):
            verify(info.path)
        kills[kind] += -9 in codes
        if codes == [0] * ranks:
            for result in directory.glob("result-*.json"):
                found = json.loads(result.read_text())
                assert found["digests"] == whole["digests"], kills
                assert found["losses"] == whole["losses"][STEPS - len(found["losses"]) :], kills
            shutil.rmtree(directory)
        else:
            assert -9 in codes, output_of(directory)
    assert len(kills) == len(POINTS), kills
