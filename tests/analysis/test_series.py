"""A metric of a run as a curve: its records and their places on every x axis."""

from __future__ import annotations

import math

import pytest

from onstep.analysis.plots.series import curve, curves, metrics_of, x_axes
from onstep.errors import DataError
from tests.support.made_logs import log_of, points, run


def test_training_metrics_are_read_from_training_and_evaluations_from_evaluations() -> None:
    records = [{"global_step": 1, "loss": 5.0}, {"global_step": 1, "loss": 9.0, "eval_loss": 4.0}]
    log = log_of(records)
    assert curve(log, "loss").y.tolist() == [5.0]
    assert curve(log, "eval_loss").y.tolist() == [4.0]
    assert len(curve(log, "other")) == 0


def test_records_without_a_metric_do_not_shift_the_others() -> None:
    records = points("loss", [3.0, 2.0, 1.0])
    records[1]["learning_rate"] = 0.5
    assert curve(log_of(records), "learning_rate").x.tolist() == [2.0]


@pytest.mark.parametrize(
    ("x_axis", "first_two", "evaluation"),
    [
        ("step", [10, 20], 50),
        ("epoch", [0.01, 0.02], 0.05),
        ("time", [0, 0.5], 2 + 1 / 60),
        ("tokens", [1000, 2000], 5000),
        ("flops", [5e9, 1e10], 2.5e10),
    ],
)
def test_points_stand_where_the_axis_has_them(x_axis: str, first_two: list[float], evaluation: float) -> None:
    [[training], [validation]] = curves([run()], ["loss", "eval_loss"], x_axis)
    assert training.x[:2] == pytest.approx(first_two)
    assert validation.x[0] == pytest.approx(evaluation)


def test_time_begins_at_the_first_record_that_is_plotted() -> None:
    [[validation]] = curves([run()], ["eval_loss"], "time")
    assert validation.x[:2] == pytest.approx([0, 2.5])


def test_an_evaluation_stands_at_the_tokens_of_its_step_also_before_and_after_all_logs() -> None:
    records = [{"global_step": step, "loss": 1.0, "total_tokens": 100 * step} for step in (10, 20)]
    records += [{"global_step": step, "eval_loss": 1.0} for step in (0, 5, 15, 30)]
    assert curve(log_of(records), "eval_loss", "tokens").x.tolist() == [0, 500, 1500, 3000]


def test_tokens_are_also_those_that_hugging_faces_trainer_counts() -> None:
    records = [{"global_step": step, "loss": 1.0, "num_input_tokens_seen": 64 * step} for step in (10, 20)]
    log = log_of([*records, {"global_step": 20, "eval_loss": 1.0}])
    assert curve(log, "loss", "tokens").x.tolist() == [640, 1280]
    assert curve(log, "eval_loss", "tokens").x.tolist() == [1280]
    assert x_axes(log) == ["step", "tokens"]


def test_what_is_not_finite_is_a_gap() -> None:
    found = curve(log_of(points("loss", [1.0, math.nan, math.inf, 2.0])), "loss")
    assert found.y == pytest.approx([1.0, math.nan, math.nan, 2.0], nan_ok=True)
    assert found.num_not_finite == 2


def test_the_newer_branch_takes_the_place_of_the_older_one() -> None:
    records = [*points("loss", [4.0, 3.0, 2.0, 9.0]), {"global_step": 3, "loss": 1.5}, {"global_step": 5, "loss": 1.0}]
    found = curve(log_of(records), "loss")
    assert (found.x.tolist(), found.y.tolist()) == ([1, 2, 3, 5], [4.0, 3.0, 1.5, 1.0])


def test_two_evaluations_at_one_step_are_both_kept() -> None:
    log = log_of([{"global_step": 5, "eval_loss": 2.0}, {"global_step": 5, "eval_loss": 1.9}])
    assert curve(log, "eval_loss").y.tolist() == [2.0, 1.9]


def test_an_axis_that_the_log_cannot_have_is_refused_with_those_that_it_has() -> None:
    log = log_of(points("loss", [1.0, 2.0], epoch=0.5))
    with pytest.raises(
        DataError, match=r"no 'total_tokens' or 'num_input_tokens_seen' for the x axis 'tokens'.*step, epoch"
    ):
        curve(log, "loss", "tokens")
    with pytest.raises(ValueError, match="Invalid x_axis: 'miles'"):
        curve(log, "loss", "miles")


def test_a_curve_can_be_cut_with_a_neighbour_on_either_side() -> None:
    found = curve(run(), "loss").within(95, 121)
    assert found.x.tolist() == [90, 100, 110, 120, 130]


def test_metrics_are_the_keys_with_numbers() -> None:
    log = log_of([{"global_step": 1, "timestamp": 1.0, "loss": 1.0, "peak_mem_allocated": [1, 2], "note": "x"}])
    assert metrics_of(log) == ["loss"]
