"""How trackers and their metrics are called, and which numbers of a record they get."""

from __future__ import annotations

import inspect
import math
import re
from importlib.util import find_spec

import pytest

from onstep.config import KEYS
from onstep.errors import ConfigError
from onstep.trackers import TRACKERS, make_tracker, tracker_class, tracker_names
from onstep.trackers.metric_names import bridge_names
from onstep.trackers.projection import Projection
from tests.support.hostile_trackers import Remembering


def test_metrics_are_called_as_hugging_faces_integrations_call_them() -> None:
    from transformers.integrations.integration_utils import rewrite_logs

    names = ["loss", "learning_rate", "epoch", "eval_loss", "eval_a_loss", "test_loss", "train_runtime", "reward/mean"]
    metrics = {name: float(number) for number, name in enumerate(names)}
    assert tracker_names(metrics) == rewrite_logs(metrics)


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
def test_a_tracker_has_the_name_it_is_asked_for(name: str) -> None:
    assert make_tracker(name).name == name


@pytest.mark.parametrize("name", TRACKERS)
def test_every_module_has_the_facts_of_a_tracker(name: str) -> None:
    kind = tracker_class(name)
    known = {argument for argument in inspect.signature(kind).parameters if argument != "self"}
    assert kind.name == name
    assert set(kind.options) <= known
    assert {key for keys in kind.options.values() for key in keys if key.startswith("logger.")} <= set(KEYS)
    assert kind.package is None or find_spec(kind.package)


def test_every_key_of_a_tracker_sets_one_of_its_options() -> None:
    given = {key for name in TRACKERS for keys in tracker_class(name).options.values() for key in keys}
    keys = [key for key in KEYS if re.match(r"logger\.(wandb|mlflow|comet|trackio)_", key)]
    assert set(keys) <= given


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wandbb", {}, "'wandbb' is not a tracker; use one of .*csv, .*Did you mean 'wandb'"),
        ("nothing_like_it", {}, "is not a tracker"),
        ("csv", {"directory": "x"}, "cannot be created with the options .*directory"),
    ],
)
def test_an_unknown_tracker_or_option_is_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tracker(name, **options)


def test_a_metric_is_shown_once_a_step_unless_it_changed() -> None:
    tracker = Remembering()
    projection = Projection(["hf"], tracker)
    for line in (
        {"global_step": 1, "loss": math.nan, "epoch": 0.5, "total_tokens": 10},
        {"global_step": 1, "loss": math.nan, "epoch": 0.5, "total_tokens": 20},
        {"global_step": 2, "eval_loss": 3.0, "epoch": 0.5},
    ):
        for call in projection.calls(line):
            call()
        projection.took(line)
    first, again, later = (call[1] for call in tracker.calls)
    assert set(first) == {"train/loss", "train/epoch", "train/total_tokens"}
    assert (again, later) == ({"train/total_tokens": 20}, {"eval/loss": 3.0, "train/epoch": 0.5})


@pytest.mark.parametrize(
    ("tracker", "shown"),
    [
        ("tensorboard", ["decoupled-learning-rate", "lm loss validation ppl", "throughput/tflops/device"]),
        ("wandb", ["samples vs steps", "lm loss validation ppl", "throughput/tflops/device"]),
        ("mlflow", ["samples vs steps", "val/lm loss ppl", "throughput/tflops_per_device"]),
        ("comet", ["lm loss validation ppl", "throughput/tflops/device"]),
        (
            "csv",
            ["samples vs steps", "decoupled-learning-rate", "lm loss validation ppl", "throughput/tflops/device"],
        ),
    ],
)
def test_each_tracker_has_its_names_of_megatron_bridges_tags(tracker: str, shown: list[str]) -> None:
    tags = ["samples vs steps", "decoupled-learning-rate", "lm loss validation ppl", "throughput/tflops/device"]
    assert list(bridge_names(tracker, dict.fromkeys(tags, 1.0))) == shown
