"""What MLflow gets instead of names and values that it does not accept."""

from __future__ import annotations

import re

import pytest

from onstep.trackers.metric_names import metric_name, parameters

ACCEPTED = re.compile(r"[/\w.\- :]*")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train/loss", "train/loss"),
        ("lm loss", "lm loss"),
        ("learning-rate", "learning-rate"),
        ("throughput/device/tokens_per_sec", "throughput/device_tokens_per_sec"),
        ("throughput/tflops/device", "throughput/tflops_per_device"),
        ("throughput/tflops", "throughput/tflops"),
        ("iter-energy/gpu", "iter-energy/gpu"),
        ("l2_norm/grad/decoder.layers.0.weight", "l2_norm/grad_decoder.layers.0.weight"),
        ("recall@5", "recall_at_5"),
        ("a//b///c", "a/b_c"),
        ("train/valid/test-data-iterators-setup-time", "train_valid_test-data-iterators-setup-time"),
        ("iteration-time", "iteration-time"),
        ("loss (smoothed), 50%", "loss _smoothed__ 50_"),
        ("train/größe", "train/größe"),
        ("/a/b/", "a/b"),
        ("../a", "__/a"),
        ("..", "__"),
        ("a/.", "a/_"),
        (".hidden", ".hidden"),
        ("", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_a_metric_gets_a_name_that_mlflow_takes(name: str, shown: str) -> None:
    assert metric_name(name) == shown
    assert ACCEPTED.fullmatch(shown)


def test_mlflow_itself_accepts_the_names() -> None:
    from mlflow.utils.validation import _validate_metric_name

    for name in ("a//b///c", "recall@5", "../a", "..", "", "./x", "a/../b", "x" * 300, "a/b/c/", "%", "/"):
        _validate_metric_name(metric_name(name))


def test_a_configuration_becomes_flat_parameters_cut_to_fit() -> None:
    config = {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}, "env": {}, "note": "x" * 9000, "none": None}
    flat = parameters(config)
    assert flat["optimizer.lr"] == "0.001"
    assert flat["optimizer.betas"] == "[0.9, 0.95]"
    assert flat["env"] == "{}"
    assert flat["none"] == "None"
    assert len(flat["note"]) == 500
    assert parameters({"a/b": {"@": 1}}) == {"a_b._": "1"}
