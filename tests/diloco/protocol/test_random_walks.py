"""Whatever is lost, repeated, overtaken or killed: nothing counts twice, no round lacks its quorum, all continue."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from onstep.diloco.protocol.messages import Settings
from tests.support.diloco.sample_walk import Dangers, Walk

SYNC = Settings(num_workers=4, min_workers=3, sync_every=3, heartbeat_timeout=45.0, initial_deadline=60.0)
FEW = Settings(num_workers=3, min_workers=1, sync_every=3, heartbeat_timeout=0.0, max_staleness=2, initial_deadline=5.0)
STRICT = Settings(num_workers=3, min_workers=2, sync_every=3, heartbeat_timeout=30.0, max_staleness=0)
ASYNC = Settings(mode="async", num_workers=4, min_workers=1, sync_every=3, max_staleness=1000)
MODES = {"sync": SYNC, "few": FEW, "strict": STRICT, "async": ASYNC}


def check(walk: Walk) -> None:
    """What holds at any time."""
    twice = [sample for sample, times in walk.counted.items() if times > 1]
    assert not twice, f"counted twice: {twice[:5]}"
    assert [one.version for one in walk.committed] == list(range(1, len(walk.committed) + 1))
    quorum = walk.settings.min_workers
    assert all(len(one.contributors) >= quorum for one in walk.committed)
    identities = [
        (one.submit.worker_id, one.submit.sequence) for closed in walk.committed for one in closed.contributions
    ]
    assert len(set(identities)) == len(identities)
    assert walk.confirmed <= walk.counted.keys(), "a worker was told that a sample was counted, and it was not"


def walked(seed: int, mode: str, dangers: Dangers, seconds: float) -> Walk:
    """A walk through dangers, at the end of which all is well again and everybody is served."""
    walk = Walk(seed, MODES[mode], dangers)
    walk.run(seconds)
    check(walk)
    walk.heal()
    walk.run(seconds + 200.0)  # who is dead comes back, delayed messages arrive
    results = [worker.num_results for worker in walk.workers]
    versions = len(walk.committed)
    walk.run(seconds + 500.0)
    check(walk)
    assert len(walk.committed) > versions
    assert all(worker.num_results > before for worker, before in zip(walk.workers, results, strict=True))
    return walk


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", MODES)
def test_whatever_goes_wrong_nothing_counts_twice_and_everybody_continues(mode: str, seed: int) -> None:
    walked(seed, mode, Dangers(), 1000.0)


@pytest.mark.parametrize("mode", ["sync", "few", "async"])
def test_with_more_workers_than_shares_each_sample_still_counts_once(mode: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        walk = Walk(seed, replace(MODES[mode], heartbeat_timeout=20.0), Dangers(), spare=2)
        walk.run(1500.0)
        check(walk)
        assert walk.committed
        seen += walk.seen
    assert seen["found no share"]
    assert seen["got another share"]


def test_without_deaths_and_drops_no_work_is_lost() -> None:
    for seed in range(5):
        walk = walked(seed, "async", Dangers(worker_dies=0.0, leaves=0.0), 1000.0)
        uncounted = {sample for worker in walk.workers for sample in worker.progress}
        assert walk.trained - uncounted <= walk.counted.keys()
        assert walk.seen["server killed"]


def test_the_walks_go_through_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for seed in range(6):
        walk = walked(seed, ("sync", "strict")[seed % 2], Dangers(), 1000.0)
        seen += walk.seen
        counts += walk.server.coordinator.counts
    assert all(seen[one] for one in ("worker killed", "server killed", "left", "dropped", "late")), seen
    for one in ("repeats", "late", "dropped", "rejoins", "complete_rounds", "rounds_by_deadline", "refused"):
        assert counts[one], (one, counts)


def test_a_walk_is_repeatable() -> None:
    first, second = (walked(3, "sync", Dangers(), 300.0) for _ in range(2))
    assert first.committed == second.committed


@pytest.mark.slow
@pytest.mark.faults
def test_a_thousand_walks() -> None:
    """The long sweep: prints what it went through."""
    seen: Counter[str] = Counter()
    for seed in range(1000):
        mode = list(MODES)[seed % len(MODES)]
        frequent = Dangers(lost=0.2, duplicated=0.3, delayed=0.2, worker_dies=60.0, server_dies=80.0)
        walk = walked(1000 + seed, mode, frequent if seed % 3 else Dangers(), 600.0)
        seen += walk.seen + Counter(rounds=len(walk.committed), samples=len(walk.counted))
    print("\nrandom walks:", dict(seen))
