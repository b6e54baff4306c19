"""Which points a checkpoint keeps: those that a kill might take from a tracker."""

from __future__ import annotations

import numpy as np

from onstep.trackers import Point, RecentPoints, numbers_of


def points_every(seconds: float, steps: int) -> RecentPoints:
    return RecentPoints(Point({"loss": float(step)}, step, 1000.0 + step * seconds) for step in range(1, steps + 1))


def test_the_points_of_the_last_seconds_are_unsettled() -> None:
    assert [point.step for point in points_every(0.5, 10).unsettled()] == [6, 7, 8, 9, 10]
    assert [point.step for point in points_every(30.0, 10).unsettled()] == [10]


def test_what_waits_in_a_queue_is_unsettled_however_old_it_is() -> None:
    assert [point.step for point in points_every(10.0, 6).unsettled(num_waiting=4)] == [3, 4, 5, 6]
    assert [point.step for point in points_every(10.0, 3).unsettled(num_waiting=99)] == [1, 2, 3]


def test_a_step_is_unsettled_as_a_whole() -> None:
    points = RecentPoints()
    for seconds, metrics in enumerate([{"loss": 1.0}, {"eval_loss": 1.5}, {"loss": 2.0}, {"eval_loss": 2.5}]):
        points.add(Point(metrics, 1 + seconds // 2, 1000.0 + 100 * seconds))
    assert [(one.step, dict(one.metrics)) for one in points.unsettled()] == [
        (2, {"loss": 2.0}),
        (2, {"eval_loss": 2.5}),
    ]


def test_settled_points_are_forgotten_step_by_step_when_told_to() -> None:
    recent = points_every(25.0, 10)
    assert len(recent.kept) == 10
    recent.forget(num_waiting=3)
    assert [point.step for point in recent.kept] == [8, 9, 10]
    recent.forget(num_waiting=0)
    assert [point.step for point in recent.kept] == [10]
    recent = RecentPoints(points_every(0.001, 5000).kept)
    recent.forget(0)
    assert [point.step for point in recent.kept] == [point.step for point in points_every(0.001, 5000).unsettled()]


def test_forgetting_changes_nothing_of_what_is_unsettled() -> None:
    for seconds in (0.1, 0.7, 10.0):
        for num_waiting in (0, 1, 5, 7, 40):
            recent = RecentPoints()
            for number in range(40):
                recent.add(Point({"loss": float(number)}, number // 3, 1000.0 + number * seconds))
            before = recent.unsettled(num_waiting)
            recent.forget(num_waiting)
            assert recent.kept == before


def test_a_point_that_waits_is_kept_through_restarts_and_whatever_their_number() -> None:
    """Time between two processes is no reason to believe that a tracker has been given anything."""
    points = points_every(0.1, 3000)
    saved = points.unsettled(num_waiting=3000)
    again = RecentPoints(saved)
    again.add(Point({"loss": 0.0}, 3001, 1_000_000.0))
    again.forget(num_waiting=3001)
    assert [point.step for point in again.unsettled(num_waiting=3001)] == list(range(1, 3002))


def test_numbers_are_of_pythons_own_types() -> None:
    numbers = numbers_of({"loss": np.float64(0.25), "ranks": [np.float64(1.0), np.float64(2.0)], "flag": True})
    assert {name: (type(one), one) for name, one in numbers.items()} == {
        "loss": (float, 0.25),
        "ranks": (float, 2.0),
        "flag": (int, 1),
    }


def test_without_points_nothing_is_unsettled() -> None:
    assert RecentPoints().unsettled(3) == ()
