"""A run with all trackers that is killed at random instants shows everywhere what an undisturbed run shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from tests.support.faults.tracker_storm import JOBS, TrackedRun, TrackerStorm, check_same
from tests.support.forked_processes import Processes

pytestmark = [pytest.mark.faults, pytest.mark.process]

Count = Callable[[str, object], None]
Make = Callable[..., TrackedRun]


@pytest.fixture(scope="module")
def make_run(
    processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path
) -> Iterator[Make]:
    """Makes a run with its services, in a directory of its own."""
    processes.load(JOBS)
    made = []

    def make(door: str, hangs: Random | None = None, **settings: object) -> TrackedRun:
        common = {"corpus": str(corpus), "cache": str(token_cache), **settings}
        made.append(TrackedRun(processes, tmp_path_factory.mktemp(door), door, common, hangs))
        return made[-1]

    yield make
    for run in made:
        run.close()


def undisturbed(make_run: Make, door: str, **settings: object) -> TrackedRun:
    run = make_run(door, **settings)
    code = run.start().wait(300)
    assert code == 0, run.output
    return run


def storm(make_run: Make, whole: TrackedRun, most: int, seed: int, **settings: object) -> Counter[str]:
    """Kill a run like `whole`; where the kills fell."""
    killed = make_run(whole.door, Random(seed), **settings)
    storm = TrackerStorm(killed, most, seed)
    storm.rage()
    sent = killed.complete()
    print(f"\n{whole.door}, seed {seed}: {dict(storm.outcomes)}; lines sent after the end: {sent}", flush=True)
    assert set(killed.complete().values()) == {0}, "nobody lacks anything now"
    check_same(whole, killed)
    return storm.outcomes


def num_kills(outcomes: Counter[str]) -> int:
    return outcomes.total() - outcomes["ended"]


@pytest.mark.parametrize("door", ["pretrain", pytest.param("trainer", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_few_kills_change_no_curve(make_run: Make, record_property: Count, door: str) -> None:
    outcomes = storm(make_run, undisturbed(make_run, door), most=4, seed=1)
    record_property("kills", num_kills(outcomes))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_hundred_kills_change_no_curve(make_run: Make, record_property: Count) -> None:
    outcomes: Counter[str] = Counter()
    kinds = [("pretrain", 1), ("trainer", 1), ("pretrain", 3)]
    whole = {(door, every): undisturbed(make_run, door, log_interval=every) for door, every in kinds}
    for seed in range(100, 200):
        door, every = kinds[seed % len(kinds)]
        outcomes += storm(make_run, whole[door, every], most=16, seed=seed, log_interval=every)
        if num_kills(outcomes) >= 300:
            break
    print(f"\nall storms: {dict(outcomes)}")
    record_property("kills", num_kills(outcomes))
    assert num_kills(outcomes) >= 300
