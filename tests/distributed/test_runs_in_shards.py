"""Runs whose checkpoints are in shards: resumed to the bit on their layout, and on others; killed at any point."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from onstep.checkpoint import checkpoints, verify
from tests.distributed.test_faults_in_passes import LAYOUTS, SHARDS, TENSORS, UPDATES, place
from tests.support.forked_processes import Processes, output_of
from tests.support.small_runs import TinyModel

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.shard_run_jobs"
RANKS = {"bare": 1, "ddp": 2, "fsdp": 2, "hsdp": 4, "distopt": 2, "mxfp8": 2}
BUCKETS = ["ddp.bucket_cap_mb=0.05", "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"]
DIVIDED: dict[str, tuple[list[str], list[str]]] = {
    **{name: LAYOUTS[name] for name in ("tp2 sp", "pp2 1F1B", "pp2 ZBV", "tp2 sp x pp2", "fsdp2 x pp2 interleaved")},
    "fsdp2 x tp2": (["tp", "dp_shard"], [*SHARDS, *TENSORS[:1]]),
    "distopt2 x tp2 sp": (["tp", "dp_shard"], [*UPDATES, *BUCKETS, *TENSORS]),
    "distopt2 x pp2": LAYOUTS["distopt2 x pp2"],
    "Trainer on pp2": (["pp"], []),
}
"""The axes of two ranks each, the fastest first, and the keys."""
RANKS |= {how: 2 ** len(axes) for how, (axes, _) in DIVIDED.items()}
STEPS = 6


@pytest.fixture(scope="module")
def untouched(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two ranks that nobody stops, and what it computes."""
    directory = tmp_path_factory.mktemp("untouched")
    settings = {"how": "fsdp", "steps": STEPS, "averages": True, "validates": True}
    [found, _] = processes.results(JOBS, "run", directory, settings)
    assert found.pop("averages_read") == 0
    return directory, found


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
    results = processes.results(JOBS, "run", directory, settings, ranks=ranks)
    read = [found.pop("averages_read") for found in results]
    assert sum(read) == sum(weight.numel() for weight in TinyModel().parameters()), "each rank reads what it holds"
    for found in results:
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


STARTS = [(4, 3, [1, 2, 3]), (2, 5, [3, 4, 5]), (3, None, [5, 6])]
"""Ranks, the step at which they die, and their steps: each start repeats the one after the last checkpoint."""


@pytest.mark.parametrize("shards", [-1, pytest.param(1, marks=pytest.mark.slow)])
def test_every_step_of_a_run_on_four_two_and_three_ranks_has_its_samples_once(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, shards: int
) -> None:
    settings = {"corpus": str(corpus), "cache": str(token_cache), "shards": shards}
    alone = {"directory": str(tmp_path / "one"), "until": None}
    [whole] = processes.results(JOBS, "elastic", tmp_path / "one", settings | alone, ranks=1)
    for ranks, until, steps in STARTS:
        place = tmp_path / f"{ranks}"
        of_start = settings | {"directory": str(tmp_path / "run"), "until": until}
        codes = processes.run(JOBS, "elastic", place, of_start, ranks=ranks)
        assert codes == [0 if until is None else 3] * ranks, output_of(place)
        found = [json.loads((place / f"result-{rank}.json").read_text()) for rank in range(ranks)]
        for of_all in zip(*found, strict=True):
            [step] = {one[0] for one in of_all}
            ids, loss = whole[step - 1][1:]
            assert sorted(one for _, of_rank, _ in of_all for one in of_rank) == sorted(ids), (ranks, step)
            assert [one[2] for one in of_all] == [pytest.approx(loss, rel=1e-5)] * ranks
        assert [one[0] for one in found[0]] == steps
    assert len({one for _, ids, _ in whole for one in ids}) == 6 * 12, "no sample is there twice"


POINTS = [
    ["write", "rank_", 24],
    ["open", "manifest", 3],
    ["rename", ".tmp-checkpoint", 3],
    ["load", "", 12],
    ["pass", "", 60],
]
"""Where ranks are killed: the operation, its file, and how many such there are at most before."""
MANY = {"write": 60, "open": 2, "rename": 2, "load": 40, "pass": 240}
"""The same for a model of four layers, so that most runs meet their kill."""
GONE = "is gone (its process was killed or crashed)"
KILLS = {"mxfp8": 10, **dict.fromkeys(("ddp", "fsdp", "hsdp", "distopt"), 60), **dict.fromkeys(DIVIDED, 20)}
KILLS |= dict.fromkeys(("tp2 sp", "pp2 1F1B", "pp2 ZBV", "fsdp2 x tp2"), 60)


def job_of(how: str) -> tuple[str, str]:
    """The module and the name of what is killed."""
    if how.startswith("Trainer"):
        return "tests.support.jobs.pipeline_trainer_jobs", "killed"
    return JOBS, "divided" if how in DIVIDED else "run"


@dataclass
class Storm:
    """Kills of a run of several ranks, whose survivors nobody ends."""

    kills: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """By the operation, and whether the killed rank is another than the first."""
    seconds: list[float] = field(default_factory=list)
    """From each kill to the end of the last survivor."""

    def strike(self, processes: Processes, directory: Path, settings: dict[str, Any]) -> list[int]:
        """A part of the run; survivors of a kill say which rank is gone."""
        victim, how = settings["killed"], settings["how"]
        ranks, killed = RANKS[how], place(DIVIDED.get(how, ([], []))[0], victim)
        printed = [directory / f"rank-{rank}.out" for rank in range(ranks)]
        lengths = [path.stat().st_size if path.exists() else 0 for path in printed]
        children = processes.start(*job_of(how), directory, settings, ranks=ranks)
        codes = {victim: children[victim].wait()}
        died = time.monotonic()
        codes |= {rank: child.wait() for rank, child in enumerate(children) if rank != victim}
        if codes[victim] == -9:
            self.seconds.append(time.monotonic() - died)
            self.kills[settings["at"][0], victim > 0] += 1
            for rank, path in enumerate(printed):
                words = path.read_text()[lengths[rank] :]
                assert rank == victim or f"{killed} {GONE}" in words, words
        assert not any(child.is_alive for child in children)
        return [codes[rank] for rank in range(ranks)]

    def __str__(self) -> str:
        points = ", ".join(f"{kind} {number}" for kind, number in sorted(self.points.items()))
        others = sum(number for (_, is_other), number in self.kills.items() if is_other)
        return f"{self.kills.total()} kills ({points}; {others} of another rank than 0); the last survivor ended " + (
            f"after {sorted(self.seconds)[len(self.seconds) // 2]:.1f} s, at most {max(self.seconds):.1f} s"
        )

    @property
    def points(self) -> Counter[str]:
        """The kills by the operation."""
        found: Counter[str] = Counter()
        for (kind, _), number in self.kills.items():
            found[kind] += number
        return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("how", "kills"), KILLS.items(), ids=str)
def test_a_storm_of_kills_changes_nothing(processes: Processes, tmp_path: Path, how: str, kills: int) -> None:
    ranks, pick, directory, storm = RANKS[how], random.Random(how), tmp_path / "run", Storm()
    common = {"how": how, "keys": DIVIDED.get(how, ([], []))[1], "steps": STEPS}
    whole = processes.results(*job_of(how), tmp_path / "whole", common, ranks=ranks)
    ends = 0
    while storm.kills.total() < kills:
        rarest = sorted(POINTS, key=lambda point: storm.points[str(point[0])])
        kind, name, most = rarest[pick.randrange(2)]
        most = MANY.get(kind, most) if how in DIVIDED else most
        rank = 0 if kind in ("open", "rename") or pick.random() < 0.1 else pick.randrange(1, ranks)
        there = checkpoints(directory / "checkpoints")
        settings = {**common, "async": pick.random() < 0.7, "killed": rank}
        settings |= {"at": [kind, name, pick.randrange(most)], "seed": 2 if there else 0}
        codes = storm.strike(processes, directory, settings)
        for info in checkpoints(directory / "checkpoints"):
            verify(info.path)
        if codes == [0] * ranks:
            ends += 1
            for rank, of_rank in enumerate(whole):
                found = json.loads((directory / f"result-{rank}.json").read_text())
                assert found["digests"] == of_rank["digests"], storm
                assert found["losses"] == of_rank["losses"][STEPS - len(found["losses"]) :], storm
                assert found["norms"] == of_rank["norms"][STEPS - len(found["norms"]) :], storm
            shutil.rmtree(directory)
        else:
            assert -9 in codes, output_of(directory)
    print(f"\n{how}: {storm}; {ends} runs ended as the untouched one")
    assert len(storm.points) == len(POINTS), storm
    assert max(storm.seconds) < 20
