"""Which points a checkpoint keeps: those that a kill might take from a tracker."""

from __future__ import annotations

from onstep.sinks import RunPoints


def points_every(seconds: float, steps: int) -> RunPoints:
    points = RunPoints()
    for step in range(1, steps + 1):
        points.add({"loss": float(step)}, step, 1000.0 + step * seconds)
    return points


def test_the_points_of_the_last_seconds_are_unsettled() -> None:
    assert [point.step for point in points_every(0.5, 10).recent.unsettled()] == [6, 7, 8, 9, 10]
    assert [point.step for point in points_every(30.0, 10).recent.unsettled()] == [10]


def test_what_waits_in_a_queue_is_unsettled_however_old_it_is() -> None:
    assert [point.step for point in points_every(10.0, 6).recent.unsettled(num_waiting=4)] == [3, 4, 5, 6]
    assert [point.step for point in points_every(10.0, 3).recent.unsettled(num_waiting=99)] == [1, 2, 3]


def test_a_step_is_unsettled_as_a_whole() -> None:
    points = RunPoints()
    for seconds, metrics in enumerate([{"loss": 1.0}, {"eval_loss": 1.5}, {"loss": 2.0}, {"eval_loss": 2.5}]):
        points.add(metrics, 1 + seconds // 2, 1000.0 + 100 * seconds)
    assert [(one.step, dict(one.metrics)) for one in points.recent.unsettled()] == [
        (2, {"loss": 2.0}),
        (2, {"eval_loss": 2.5}),
    ]


def test_old_points_are_forgotten_step_by_step() -> None:
    assert [point.step for point in points_every(25.0, 10).recent.kept] == [8, 9, 10]
    assert len(points_every(0.001, 5000).recent.kept) == 2000


def test_without_points_nothing_is_unsettled() -> None:
    assert RunPoints().recent.unsettled(3) == ()
