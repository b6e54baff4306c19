"""When a round closes without all: quorum, the deadline that is learned, and what bounds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onstep.diloco.protocol.messages import Deregister, Settings
from tests.support.diloco.stepped_run import THREE, SteppedRun, joined, weights


def test_the_first_round_waits_for_the_expected_workers_until_the_initial_deadline() -> None:
    run = joined("a", "b")
    run.submit_each("a", "b")
    assert run.wait(THREE.initial_deadline - 1) == []
    (closed,) = run.wait(1.0)
    assert weights(closed) == {"a": 10, "b": 10}
    assert not closed.is_complete


def test_the_first_round_closes_at_once_when_the_last_expected_worker_has_come() -> None:
    run = joined("a", "b")
    run.submit_each("a", "b")
    run.join("c")
    run.submit("c")
    (closed,) = run.commit()
    assert closed.is_complete


@pytest.mark.parametrize("how", ["departed", "evicted"])
def test_who_came_and_went_does_not_complete_the_first_round(how: str) -> None:
    run = joined("gone", "a")
    if how == "departed":
        run.coordinator.handle(Deregister("gone", "s1"), run.now)
    else:
        run.coordinator.evict("gone", run.now)
    run.join("b")
    run.submit_each("a", "b")
    assert run.commit() == []  # two of three are there
    if how == "departed":
        run.join("c")
        run.submit("c")
    else:
        run.join("gone")
        run.submit("gone")
    (closed,) = run.commit()
    assert (len(closed.contributors), closed.is_complete) == (3, True)


def test_who_has_submitted_and_left_is_part_of_the_first_round() -> None:
    run = joined("a", "b", "c")
    run.submit("a")
    run.coordinator.handle(Deregister("a", "s1"), run.now)
    run.submit("b")
    assert run.commit() == []
    run.submit("c")
    (closed,) = run.commit()
    assert (closed.contributors, closed.is_complete) == (("a", "b", "c"), True)


def test_who_leaves_after_all_were_there_does_not_hold_up_the_first_round_of_a_restarted_server() -> None:
    run = joined("a", "b", "c")
    run.coordinator.handle(Deregister("c", "s1"), run.now)
    restarted = SteppedRun(state=run.coordinator.state_dict())
    restarted.submit("a")
    restarted.submit("b")
    assert len(restarted.commit()) == 1


def test_one_who_comes_back_is_not_counted_twice() -> None:
    run = joined("a", "b")
    run.submit("a")
    run.coordinator.evict("a", run.now)
    run.join("a")
    run.submit("b")
    assert run.commit() == []


def test_without_a_quorum_a_round_waits_for_ever() -> None:
    run = joined("a", "b", "c", settings=replace(THREE, heartbeat_timeout=60.0))
    run.submit("a")
    assert run.wait(1e6) == []
    assert run.coordinator.status(run.now)["num_registered"] == 0
    run.join("a", "b")
    run.submit("b")
    (closed,) = run.wait(1e6)
    assert weights(closed) == {"a": 10, "b": 10}


def test_after_regular_rounds_a_dead_worker_delays_a_round_by_little() -> None:
    run = joined("a", "b", "c", settings=THREE)
    for number in range(5):
        run.round(number, "a", "b", "c", seconds=100.0)
    run.round(5, "a", "b", seconds=100.0)
    assert run.wait(9.0) == []
    assert len(run.wait(1.1)) == 1  # a tenth of a usual round


def test_a_worker_that_usually_comes_later_is_waited_for() -> None:
    run = joined("a", "b", "c", settings=THREE)
    for number in range(5):
        assert run.round(number, "a", "b", "c", seconds=100.0, after=20.0)
    run.round(5, "a", "b", seconds=100.0, after=20.0)
    assert run.wait(20.0) == []
    run.submit("c", 5, 5)
    (closed,) = run.commit()
    assert closed.is_complete


def test_a_worker_that_missed_a_round_is_waited_for_the_next_time() -> None:
    run = joined("a", "b", "c", settings=replace(THREE, initial_deadline=1.0))
    run.round(0, "a", "b", seconds=100.0)
    (first,) = run.wait(20.0)
    assert not first.is_complete
    run.submit("c", 0, 0)
    (second,) = run.round(1, "a", "b", seconds=81.0)
    assert weights(second) == {"a": 10, "b": 10, "c": 5}
    run.round(2, "a", "b", seconds=100.0)
    assert run.wait(20.0) == []
    run.submit("c", 2, 2)
    (third,) = run.commit()
    assert third.is_complete


@pytest.mark.parametrize("patience", [1.5, 3.0])
def test_patience_bounds_how_long_a_straggler_is_waited_for(patience: float) -> None:
    run = joined("a", "b", "c", settings=replace(THREE, patience=patience, initial_deadline=5000.0))
    run.round(0, "a", "b", seconds=100.0)
    run.wait(900.0)
    run.submit("c")  # ten times as long as the others
    assert len(run.commit()) == 1
    run.round(1, "a", "b", seconds=100.0)
    bound = (patience - 1) * 100.0 + 10.0
    assert run.wait(bound - 1) == []
    assert len(run.wait(2.0)) == 1


def test_an_outage_does_not_make_later_rounds_long() -> None:
    run = joined("a", "b", "c", settings=THREE)
    for number in range(5):
        run.round(number, "a", "b", "c", seconds=100.0)
    run.round(5, "a", "b", "c", seconds=36_000.0)
    run.round(6, "a", "b", seconds=100.0)
    assert len(run.wait(30.0)) == 1


def test_late_results_alone_do_not_close_the_next_round_early() -> None:
    run = joined("a", "b", "c", settings=Settings(num_workers=3, min_workers=1, sync_every=10, heartbeat_timeout=0.0))
    for number in range(3):
        run.round(number, "a", "b", "c", seconds=100.0)
    run.round(3, "a", "b", seconds=100.0)
    assert len(run.wait(10.0)) == 1
    run.submit("c", 3, 3)
    assert run.wait(99.0) == []
    run.submit("a", 4, 4)
    run.submit("b", 4, 4)
    (closed,) = run.commit()
    assert weights(closed) == {"a": 10, "b": 10, "c": 5}


def test_a_round_that_has_a_quorum_closes_when_the_missing_leave_or_are_evicted() -> None:
    for leave in ("deregister", "evict"):
        run = joined("a", "b", "c")
        run.submit_each("a", "b")
        if leave == "evict":
            assert run.coordinator.evict("c", run.now)
        else:
            run.coordinator.handle(Deregister("c", "s1"), run.now)
        assert len(run.commit()) == 1


def test_what_a_worker_submitted_before_it_died_counts() -> None:
    run = joined("a", "b", "c")
    run.submit("a")
    run.coordinator.evict("a", run.now)
    run.submit_each("b", "c")
    (closed,) = run.commit()
    assert weights(closed) == {"a": 10, "b": 10, "c": 10}


def test_only_one_round_of_a_fragment_is_executed_at_a_time() -> None:
    run = joined("a", "b", settings=Settings(num_workers=2, min_workers=1, sync_every=10, max_staleness=3))
    run.submit_each("a", "b")
    (closed,) = run.coordinator.take_closed()
    run.submit("a", 1, 0)
    run.submit("b", 1, 0)
    assert run.coordinator.take_closed() == []
    run.coordinator.committed(closed, "digest", run.now)
    (after,) = run.coordinator.take_closed()
    assert (after.version, weights(after)) == (2, {"a": 5, "b": 5})


def test_a_quorum_of_late_results_in_every_round_does_not_shorten_the_rounds() -> None:
    run = joined(*"abcdef", settings=replace(THREE, num_workers=6, initial_deadline=1.0, patience=1.0))
    run.round(0, "a", "b", seconds=100.0)
    run.wait(1.0)
    for base in range(1, 15):
        assert run.wait(5.0) == []
        for worker in "cd" if base % 2 else "ef":
            run.submit(worker, base, base - 1)
        assert run.wait(95.0) == [], "closed without those that were on time"
        for worker in "ab":
            run.submit(worker, base, base)
        (closed,) = run.wait(10.0)
        assert len(closed.contributors) == 4
