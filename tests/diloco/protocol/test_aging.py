"""How much a submission counts falls with its age, whatever the amount of work in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from onstep.diloco.protocol.aging import age, reason_to_drop, scale_of
from onstep.diloco.protocol.messages import Accepted, Dropped, Settings, Submit
from tests.support.diloco.stepped_run import THREE, joined, weights

ASYNC = Settings.with_quorum(3, "async", sync_every=10)


@pytest.mark.parametrize("rounds", [1, 2, 5, 20])
def test_a_worker_that_returns_has_less_weight_than_the_mean_of_the_others_and_moves_no_schedule(rounds: int) -> None:
    run = joined("a", "b", "c", settings=replace(THREE, max_staleness=100))
    for number in range(rounds):
        run.round(number, "a", "b")
        run.wait(THREE.initial_deadline)
    before = run.coordinator.step
    assert isinstance(run.submit("c", 0, 0, tokens=10 * rounds, steps=10 * rounds), Accepted)
    (closed,) = run.round(rounds, "a", "b")
    assert weights(closed) == {"a": 10, "b": 10, "c": 10 / (1 + rounds)}
    assert run.coordinator.step == before + 10


def test_two_late_submissions_of_a_worker_together_count_for_one() -> None:
    run = joined("a", "b", "c")
    run.round(0, "a", "b")
    run.wait(THREE.initial_deadline)
    run.submit("c", 0, 0, tokens=30)
    run.submit("c", 1, 0, tokens=10)
    (closed,) = run.round(1, "a", "b")
    late = [one.weight for one in closed.contributions if one.submit.worker_id == "c"]
    assert late == [3.75, 1.25]


def test_if_all_are_late_they_count_by_the_least_and_the_run_advances_by_the_fewest_steps() -> None:
    run = joined("a", "b", settings=replace(THREE, num_workers=2, sync_every=50))
    run.round(0, "a", "b")
    run.submit("a", 1, 0, tokens=20, steps=20)
    run.submit("b", 1, 0, tokens=70, steps=70)
    (closed,) = run.commit()
    assert weights(closed) == {"a": 10, "b": 10}
    assert run.coordinator.step == 30


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_after_an_outage_of_the_server_the_model_moves_as_far_as_in_a_cycle(mode: Literal["sync", "async"]) -> None:
    settings = Settings.with_quorum(2, mode, sync_every=10)
    run = joined("a", "b", settings=settings)
    for worker in "ab":
        run.submit(worker, 0, 0, tokens=10, steps=10)  # what was pending when the server went away
    run.commit()
    before = run.coordinator.step
    for worker in "ab":
        run.submit(worker, 1, 0, tokens=590, steps=590)
    closed = run.commit()
    ages = [1, 1] if mode == "sync" else [1.5, 2]
    assert [part.scale for one in closed for part in one.contributions] == [10 / 590 / one for one in ages]
    assert before < run.coordinator.step <= before + 10


@pytest.mark.parametrize("returning", ["a", "ab"])
def test_only_most_of_the_workers_make_a_round_after_an_outage(returning: str) -> None:
    run = joined("a", "b", "c", settings=replace(THREE, min_workers=1, sync_every=10))
    run.round(0, "c")
    run.wait(THREE.initial_deadline)
    for worker in returning:
        run.submit(worker, 0, 0, tokens=590, steps=590)
    (closed,) = run.wait(THREE.initial_deadline)
    assert closed.is_mean == (returning == "ab")


def test_late_work_of_no_step_is_accepted() -> None:
    run = joined("a", "b", "c")
    run.round(0, "a", "c")
    run.wait(THREE.initial_deadline)
    assert isinstance(run.submit("b", 0, 0, steps=0), Accepted)


def test_a_joiner_is_not_outweighed_by_those_that_trained_on_without_the_server() -> None:
    run = joined("a", "b", "c", settings=replace(THREE, sync_every=10))
    run.round(0, "a", "b")
    run.wait(THREE.initial_deadline)
    for worker in "ab":
        run.submit(worker, 1, 0, tokens=590, steps=590)
    (closed,) = run.round(1, "c")
    moved = {one.submit.worker_id: one.weight * one.scale * one.submit.steps for one in closed.contributions}
    assert moved == pytest.approx({"a": 50, "b": 50, "c": 100})


def test_in_asynchronous_mode_a_round_has_as_many_versions_as_workers() -> None:
    assert [age(behind, ASYNC) for behind in (0, 2, 5, 26)] == [0, 0, 1, 8]
    assert reason_to_drop(26, ASYNC) is None
    assert reason_to_drop(27, ASYNC) == "27 versions late, which are 8.3 rounds, max_staleness is 8"


def test_in_asynchronous_mode_late_work_moves_the_model_less_than_a_cycle_does() -> None:
    run = joined("a", "b", "c", settings=ASYNC)
    for number in range(5):
        run.submit("a", number, number)
        assert [part.scale for one in run.commit() for part in one.contributions] == [1.0]
    run.submit("c", 0, 0, steps=50)
    assert [part.scale for one in run.commit() for part in one.contributions] == [10 / 50 / 2]
    for number in range(5, 30):
        run.submit("a", number, number + 1)
        run.commit()
    assert isinstance(run.submit("b", 0, 0), Dropped)


def test_work_that_is_not_late_is_applied_as_it_is() -> None:
    assert scale_of(Submit("a", "s", 0, 0, 3, 10, 10), 2, ASYNC) == 1.0
    for settings in (ASYNC, THREE):
        assert scale_of(Submit("a", "s", 0, 0, 5, 1000, 1000), 0, settings) == 1.0
