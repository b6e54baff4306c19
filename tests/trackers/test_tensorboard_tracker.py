"""What TensorBoard's own reader shows of a run."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onstep.errors import MissingExtraError
from onstep.trackers import make_tracker
from onstep.trackers.services import tensorboard_tracker as module
from tests.support.hostile_trackers import identity
from tests.support.tracker_files import scalars, texts


def write(directory: Path, points: list[tuple[int, float]], first: int | None = None) -> Path:
    """Open where the step `first` comes next, log `train/loss` and close; the directory of the event files."""
    tracker = make_tracker("tensorboard")
    tracker.open(identity(directory), {} if first is None else {"step": first, "samples": 4 * first})
    for step, value in points:
        tracker.log({"train/loss": value}, step, 1000.0 + step)
    tracker.close("completed")
    return directory / "tensorboard"


def test_points_have_step_value_and_time(tmp_path: Path) -> None:
    directory = write(tmp_path, [(1, 2.5), (3, math.inf)])
    reader = EventAccumulator(str(directory))
    reader.Reload()
    found = [(event.step, event.value, event.wall_time) for event in reader.Scalars("train/loss")]
    assert found == [(1, 2.5, 1001.0), (3, math.inf, 1003.0)]


def test_points_are_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    tracker = make_tracker("tensorboard")
    tracker.open(identity(tmp_path), {})
    tracker.log({"train/loss": 1.0}, 1, 0.0)
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(1, 1.0)]}
    tracker.close("completed")


def test_a_run_that_continues_shows_each_step_once(tmp_path: Path) -> None:
    write(tmp_path, [(step, float(step)) for step in range(1, 8)])
    write(tmp_path, [(5, 50.0), (6, 60.0)], first=5)
    directory = write(tmp_path, [(5, 500.0)], first=5)
    assert scalars(directory)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 500.0)]


def test_curves_over_samples_are_taken_back_by_samples(tmp_path: Path) -> None:
    for state, values in (({}, {4: 1.0, 8: 2.0, 12: 3.0}), ({"step": 2, "samples": 8}, {8: 20.0})):
        tracker: Any = make_tracker("tensorboard")
        tracker.open(identity(tmp_path), state)
        for samples, value in values.items():
            tracker.log_over_samples({"lm loss vs samples": value}, samples, 1000.0)
        assert tracker.state_dict()["samples"] == max(values) + 1
        tracker.close("completed")
    shown = scalars(tmp_path / "tensorboard" / "vs_samples")
    assert shown == {"lm loss vs samples": [(4, 1.0), (8, 20.0)]}


def test_a_fresh_run_hides_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, [(0, 1.0), (9, 9.0)])
    assert scalars(write(tmp_path, [(1, 2.0)]))["train/loss"] == [(1, 2.0)]


def test_a_machine_whose_clock_is_late_still_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [(step, float(step)) for step in range(1, 5)])
    monkeypatch.setattr(module.time, "time", lambda: 1000.0)
    assert scalars(write(tmp_path, [(3, 30.0)], first=3))["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_the_configuration_and_texts_are_shown_once(tmp_path: Path) -> None:
    tracker = make_tracker("tensorboard", log_dir=tmp_path / "board")
    tracker.open(identity(tmp_path, config={"train": {"lr": 0.1}}), {})
    tracker.text("samples", "Once upon a time", 3)
    tracker.close("completed")
    assert texts(tmp_path / "board") == ["config", "samples"]
    reader = EventAccumulator(str(tmp_path / "board"))
    reader.Reload()
    [shown] = reader.Tensors("samples")
    assert (shown.step, shown.tensor_proto.string_val[0]) == (3, b"Once upon a time")
    assert reader.SummaryMetadata("samples").plugin_data.plugin_name == "text"
    assert b'"lr": 0.1' in reader.Tensors("config")[0].tensor_proto.string_val[0]


def test_without_tensorboard_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onstep.trackers.tracker.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'onstep\[tensorboard\]'"):
        make_tracker("tensorboard")


def test_an_event_file_that_cannot_be_made_leaves_only_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    with pytest.raises(FileNotFoundError):
        module.EventFile(tmp_path / "missing" / "events")
    gc.collect()
    assert unraisable == []
