"""What can be asked of the log of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.analysis import TrainingLog, distinct_labels
from onstep.errors import ConfigError

RECORDS: list[dict[str, Any]] = [
    {"timestamp": 10.0, "global_step": 10, "epoch": 0.1, "loss": 3.0, "learning_rate": 1e-3},
    {"timestamp": 20.0, "global_step": 20, "epoch": 0.2, "loss": math.nan},
    {"timestamp": 21.0, "global_step": 20, "epoch": 0.2, "eval_loss": 2.5},
    {"timestamp": 30.0, "global_step": 30, "epoch": 0.3, "loss": 2.0, "learning_rate": 1e-4},
    {"timestamp": 31.0, "global_step": 30, "epoch": 0.3, "loss": 1.0, "eval_loss": 2.75},
    {"timestamp": 32.0, "global_step": 30, "train_runtime": 22.0},
    {"timestamp": 33.0, "global_step": 30, "eval_loss": 2.75},
]


@pytest.fixture(params=["file", "list"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> TrainingLog:
    """The same records, read from a file and given as a list."""
    if request.param == "list":
        return TrainingLog(Path("somewhere.json"), RECORDS)
    path = tmp_path / "trainer_logs.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]")
    return TrainingLog.from_run_dir(tmp_path)


def test_training_and_evaluation_records_are_told_apart(log: TrainingLog) -> None:
    assert log.get_steps(log.get_training_records()) == [10, 20, 30]
    assert log.get_metric_values("eval_loss", log.get_eval_records()) == [2.5, 2.75, 2.75]
    assert log.is_training.tolist() == [True, True, False, True, False, False, False]


def test_final_record_is_the_last_with_a_runtime(log: TrainingLog) -> None:
    assert log.get_final_record() == RECORDS[5]


def test_values_are_those_of_the_records_that_have_them(log: TrainingLog) -> None:
    assert log.get_metric_values("learning_rate") == [1e-3, 1e-4]
    assert log.get_epochs(log.get_training_records()) == [0.1, 0.2, 0.3]
    assert log.get_timestamps()[-1] == 33.0
    assert len(log.get_steps()) == 7


def test_points_belong_together_where_some_records_lack_the_metric(log: TrainingLog) -> None:
    steps, rates = log.get_points("learning_rate")
    assert (steps.tolist(), rates.tolist()) == ([10, 30], [1e-3, 1e-4])
    times, losses = log.get_points("loss", x="timestamp")
    assert times.tolist() == [10, 20, 30, 31]
    assert np.array_equal(losses, [3.0, math.nan, 2.0, 1.0], equal_nan=True)


def test_best_step_passes_over_nan(log: TrainingLog) -> None:
    assert log.find_best_step("loss") == (30, 1.0)
    assert log.find_best_step("loss", "max") == (10, 3.0)
    assert log.find_best_step("absent") is None


def test_best_step_needs_a_mode_and_a_step() -> None:
    log = TrainingLog(Path("log.json"), [{"loss": 1.0}])
    with pytest.raises(ConfigError, match="'min' or 'max', got 'best'"):
        log.find_best_step("loss", "best")
    with pytest.raises(KeyError, match="global_step"):
        log.find_best_step("loss")


def test_keys_are_in_order_of_first_appearance(log: TrainingLog) -> None:
    expected = ["timestamp", "global_step", "epoch", "loss", "learning_rate", "eval_loss", "train_runtime"]
    assert log.keys() == expected


def test_only_true_numbers_are_numbers() -> None:
    log = TrainingLog(Path("log.json"), [{"a": value} for value in (True, "1", None, [2], 3, 10**400, -(10**400))])
    assert np.array_equal(log.column("a"), [np.nan] * 4 + [3, np.inf, -np.inf], equal_nan=True)


@pytest.mark.parametrize(
    ("path", "run_name", "model_name"),
    [
        ("project/output_models/gpt/runs/run1/trainer_logs.json", "run1", "gpt"),
        ("/data/runs/output_models/gpt/runs/run1/trainer_logs.json", "run1", "gpt"),
        ("runs/run1/trainer_logs.json", "run1", None),
        ("/runs/run1/trainer_logs.json", "run1", None),
        ("out/runs/trainer_logs.json", "trainer_logs.json", "out"),
        ("elsewhere/trainer_logs.json", None, None),
    ],
)
def test_names_come_from_the_directories(path: str, run_name: str | None, model_name: str | None) -> None:
    log = TrainingLog(Path(path), [])
    assert (log.run_name, log.model_name) == (run_name, model_name)


def test_names_that_are_given_are_kept() -> None:
    log = TrainingLog(Path("output_models/gpt/runs/run1/trainer_logs.json"), [], run_name="mine", model_name="other")
    assert (log.run_name, log.model_name) == ("mine", "other")


def test_directory_with_a_run_record_is_the_run_wherever_it_stands(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "first"
    directory.mkdir(parents=True)
    (directory / "run.json").write_text("{}")
    (directory / "trainer_logs.json").write_text("[\n]")
    log = TrainingLog.from_run_dir(directory)
    assert (log.run_name, log.model_name) == ("first", None)
    assert log.get_label(0) == "first"


def test_label_prefers_what_was_given() -> None:
    path = Path("output_models/gpt/runs/run1/trainer_logs.json")
    assert TrainingLog(path, [], label="best").get_label(0) == "best"
    assert TrainingLog(path, []).get_label(0) == "gpt"
    assert TrainingLog(Path("runs/run1/x.json"), []).get_label(0) == "run1"
    assert TrainingLog(Path("x.json"), []).get_label(1) == "Run 2"


def test_no_two_logs_of_a_comparison_have_one_label() -> None:
    names = ["output_models/gpt/runs/a/x", "output_models/gpt/runs/b/x", "output_models/bert/runs/a/x", "runs/gpt/x"]
    logs = [TrainingLog(Path(name), []) for name in [*names, names[0]]]
    assert distinct_labels(logs) == ["gpt/a", "gpt/b", "bert", "gpt", "gpt/a (2)"]


def test_log_without_a_name_is_called_as_its_place(tmp_path: Path) -> None:
    def labels(*paths: str) -> list[str]:
        return distinct_labels([TrainingLog(tmp_path / path, []) for path in paths])

    assert labels("mine/trainer_logs.json") == ["mine"]
    assert labels("hf/checkpoint-500/trainer_state.json", "notes.jsonl") == ["hf/checkpoint-500", "notes"]
    assert labels("a/x/trainer_logs.json", "b/x/trainer_logs.json") == ["a/x", "b/x"]
    assert labels("a/log.json", "b/log.json", "b/log.jsonl") == ["a/log", "b/log", "b/log (2)"]
    assert TrainingLog(tmp_path / "mine/trainer_logs.json", []).get_label(0) == "Run 1"
