"""How trackers and their metrics are called, and which numbers of a record they get."""

from __future__ import annotations

import math

import pytest

from onstep.errors import ConfigError
from onstep.sinks import Point, RunPoints, make_sink, points_for, tracker_names
from onstep.sinks.sink_names import SINKS


def test_metrics_are_called_as_hugging_faces_integrations_call_them() -> None:
    from transformers.integrations.integration_utils import rewrite_logs

    names = ["loss", "learning_rate", "epoch", "eval_loss", "eval_a_loss", "test_loss", "train_runtime", "reward/mean"]
    metrics = {name: float(number) for number, name in enumerate(names)}
    assert tracker_names(metrics) == rewrite_logs(metrics)


def test_what_trackers_tell_of_themselves_keeps_its_name() -> None:
    assert tracker_names({"sink/dropped": 3, "step": 7}) == {"sink/dropped": 3}


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
def test_a_sink_has_the_name_it_is_asked_for(name: str) -> None:
    assert make_sink(name).name == name


def test_every_tracker_has_a_module_and_a_class() -> None:
    from importlib import import_module

    for name, (module, class_name) in SINKS.items():
        assert getattr(import_module(module), class_name).name == name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wandbb", {}, "'wandbb' is no tracker; use one of comet, csv, mlflow, .*Did you mean 'wandb'"),
        ("nothing_like_it", {}, "is no tracker"),
        ("csv", {"folder": "x"}, "cannot be made with the options .*folder"),
    ],
)
def test_an_unknown_tracker_or_option_is_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sink(name, **options)


def test_a_metric_is_shown_once_a_step_unless_it_changed() -> None:
    points = RunPoints()
    first = points.add({"loss": math.nan, "epoch": 0.5, "total_tokens": 10}, 1, 0.0)[1]
    again = points.add({"loss": math.nan, "epoch": 0.5, "total_tokens": 20}, 1, 1.0)[1]
    later = points.add({"epoch": 0.5}, 2, 2.0)[1]
    assert set(first.metrics) == {"train/loss", "train/epoch", "train/total_tokens"}
    assert (again.metrics, later.metrics) == ({"train/total_tokens": 20}, {"train/epoch": 0.5})


def test_a_checkpoint_gets_the_records_of_the_last_step() -> None:
    points = RunPoints()
    points.add({"loss": 1.0}, 1, 10.0)
    points.add({"loss": 2.0, "epoch": 0.5}, 2, 20.0)
    points.add({"eval_loss": 3.0, "epoch": 0.5}, 2, 21.0)
    expected = (Point({"loss": 2.0, "epoch": 0.5}, 2, 20.0), Point({"eval_loss": 3.0, "epoch": 0.5}, 2, 21.0))
    assert (
        points.recent.last
        == RunPoints(points.recent.last).recent.last
        == points_for(True, points.recent.last)
        == expected
    )
    assert [dict(point.metrics) for point in points_for(False, points.recent.last)] == [
        {"train/loss": 2.0, "train/epoch": 0.5},
        {"eval/loss": 3.0},
    ]
