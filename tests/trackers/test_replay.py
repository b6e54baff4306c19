"""A tracker that is filled afterwards has what it would have had."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from onstep import JsonLogger, pretrain
from onstep.callbacks import TrackersCallback
from onstep.config import ConfigContainer
from onstep.record import MetricsLog, MetricsLogError
from onstep.trackers import make_tracker, replay
from tests.support.hostile_trackers import Raising, Remembering
from tests.support.tracker_files import scalars, table
from tests.support.tracker_reading import mlflow_points, mlflow_runs, without_keys


def metrics_log(directory: Path, records: list[dict[str, Any]]) -> Path:
    with MetricsLog.open(directory / "trainer_logs.json") as file:
        for record in records:
            file.append(record)
    return directory / "trainer_logs.json"


def loss_at(step: int) -> dict[str, Any]:
    return {"timestamp": 1000.0 + step, "global_step": step, "epoch": step / 10, "loss": 1.0 / step}


def test_a_replayed_run_has_what_the_live_trackers_have(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    """Also where one of them missed everything."""
    tiny_config.run.name, tiny_config.run.output_dir = "run", str(tmp_path)
    tiny_config.run.save_weights, tiny_config.logger.log_interval = False, 1
    dead, run = Raising("log"), tmp_path / "run"
    pretrain(tiny_config, callbacks=[JsonLogger(note="x"), TrackersCallback(["csv", "tensorboard", dead])])
    for name in ("csv", "tensorboard"):
        replay(run / "trainer_logs.json", make_tracker(name), output=tmp_path / "again")
    live, again = table(run / "metrics.csv"), table(tmp_path / "again" / "metrics.csv")
    assert live.drop(columns="timestamp").equals(again[live.columns].drop(columns="timestamp"))
    assert len(live) > 8
    assert scalars(tmp_path / "again" / "tensorboard") == scalars(run / "tensorboard")
    dead.where.clear()
    dead.calls.clear()
    replay(run / "trainer_logs.json", dead)
    shown = [(call[2], call[1]["train/loss"]) for call in dead.calls if call[0] == "log" and "train/loss" in call[1]]
    assert [step for step, _ in shown] == list(range(1, 9))


def test_replaying_twice_into_fresh_targets_gives_the_same(tmp_path: Path) -> None:
    path = metrics_log(tmp_path, [loss_at(step) for step in range(1, 20)])
    for directory in ("a", "b"):
        replay(path, make_tracker("csv"), output=tmp_path / directory)
        replay(path, make_tracker("tensorboard"), output=tmp_path / directory)
    assert (tmp_path / "a" / "metrics.csv").read_text() == (tmp_path / "b" / "metrics.csv").read_text()
    assert scalars(tmp_path / "a" / "tensorboard") == scalars(tmp_path / "b" / "tensorboard")


def test_replaying_into_the_runs_own_directory_shows_each_step_once(tmp_path: Path) -> None:
    path = metrics_log(tmp_path, [loss_at(step) for step in range(1, 5)])
    for _ in range(3):
        replay(path, make_tracker("tensorboard"))
        replay(path, make_tracker("csv"))
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["train/loss"]] == [1, 2, 3, 4]
    assert list(table(tmp_path / "metrics.csv").step) == [1, 2, 3, 4]


def test_steps_times_and_kinds_are_the_metrics_logs(tmp_path: Path) -> None:
    records = [
        {"timestamp": 1.0, "global_step": 0, "epoch": 0.0, "experiment_info": {"note": 1}},
        loss_at(1),
        {"timestamp": 1002.0, "global_step": 1, "epoch": 0.1, "eval_loss": 0.5, "peak_mem": [3, 4]},
    ]
    tracker = Remembering()
    assert replay(metrics_log(tmp_path, records), tracker) == 2
    assert tracker.calls[1:] == [
        ("log", {"train/epoch": 0.1, "train/loss": 1.0}, 1, 1001.0),
        ("log", {"eval/loss": 0.5, "train/peak_mem": 4}, 1, 1002.0),
        ("close", "completed"),
    ]


def test_the_identity_comes_from_run_json_and_is_kept_apart_from_the_runs_own(tmp_path: Path) -> None:
    content = {"run_id": "abc", "name": "mine", "status": "preempted", "config": {"train": {"lr": 1}}}
    (tmp_path / "run.json").write_text(json.dumps(content))
    tracker = Remembering()
    replay(metrics_log(tmp_path, [loss_at(1)]), tracker, output=tmp_path / "out")
    _, run, state = tracker.calls[0]
    assert (run.name, run.config, run.directory) == ("mine", {"train": {"lr": 1}}, tmp_path / "out")
    assert re.fullmatch("abc-replay-[0-9a-f]{8}", run.run_id)
    assert (run.start_step, state, tracker.calls[-1]) == (0, {}, ("close", "preempted"))


@pytest.mark.parametrize("name", ["mlflow", "wandb", "comet"])
@pytest.mark.slow
def test_each_replay_is_a_run_of_its_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_keys(monkeypatch, tmp_path)
    path = metrics_log(tmp_path, [loss_at(1), loss_at(2)])
    ids = []
    for _ in range(2):
        tracker = make_tracker(name)
        replay(path, tracker)
        ids.append(tracker.state_dict()["id"])
    assert ids[0] != ids[1]
    if name == "mlflow":
        client, runs = mlflow_runs(tmp_path)
        found = [mlflow_points(client, run, "train/loss") for run in runs]
        assert found == [[(1, 1.0), (2, 0.5)]] * 2


def test_a_metrics_log_that_a_crash_cut_short_gives_what_is_whole(tmp_path: Path) -> None:
    path = metrics_log(tmp_path, [loss_at(step) for step in range(1, 4)])
    path.write_bytes(path.read_bytes()[:-20])
    tracker = Remembering()
    assert replay(path, tracker) == 2
    assert tracker.steps == [1, 2]


def test_a_trackers_error_is_raised_and_the_tracker_closed_as_failed(tmp_path: Path) -> None:
    tracker = Raising("log")
    with pytest.raises(OSError, match="no route to host"):
        replay(metrics_log(tmp_path, [loss_at(1)]), tracker)
    assert tracker.calls[-1] == ("close", "failed")


def test_more_records_than_any_queue_holds_all_arrive(tmp_path: Path) -> None:
    path = metrics_log(tmp_path, [loss_at(step) for step in range(1, 3001)])
    tracker = Remembering()
    assert replay(path, tracker) == 3000
    assert tracker.steps == list(range(1, 3001))


def test_a_file_that_is_no_metrics_log_is_refused_before_the_tracker_is_opened(tmp_path: Path) -> None:
    (tmp_path / "trainer_logs.json").write_text("{}")
    tracker = Remembering()
    with pytest.raises(MetricsLogError):
        replay(tmp_path / "trainer_logs.json", tracker)
    assert tracker.calls == []


@pytest.mark.parametrize("records", [[], [{"timestamp": 1.0, "global_step": 0, "epoch": 0.0}]])
def test_a_metrics_log_without_metrics_is_refused_before_anything_is_written(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "metrics.csv").write_text("step,kind\n")
    with pytest.raises(MetricsLogError, match="no metrics to send"):
        replay(metrics_log(tmp_path, records), make_tracker("csv"))
    assert not (tmp_path / "metrics.1.csv").exists()


def test_what_a_cut_metrics_log_lacks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = metrics_log(tmp_path, [loss_at(step) for step in range(1, 4)])
    whole = path.read_bytes()
    for end in (len(whole), -2):  # whole records, with and without the closing bracket
        path.write_bytes(whole[:end])
        replay(path, Remembering())
        assert not caplog.records
    path.write_bytes(whole[:-20])
    replay(path, Remembering())
    [warning] = [record.getMessage() for record in caplog.records]
    assert "after step 2" in warning
    assert '"global_step": 3' in warning or '"timestamp": 1003.0' in warning


def test_a_tracker_of_ones_own_need_not_say_which_names_it_gets(tmp_path: Path) -> None:
    class Bare(Remembering):
        def __getattribute__(self, name: str) -> Any:
            if name in ("keeps_names", "takes_back"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    tracker = Bare()
    assert replay(metrics_log(tmp_path, [loss_at(1)]), tracker) == 1
    assert tracker.calls[1][1]["train/loss"] == 1.0


BAD_RECORDS = {
    "a list as step": ({"global_step": [1], "loss": 1.0}, "global_step is [1], which must be an integer"),
    "NaN as step": ({"global_step": float("nan"), "loss": 1.0}, "global_step is nan, which must be an integer"),
    "a huge step": ({"global_step": 10**400, "loss": 1.0}, "which must be an integer from 0 to 2**63 - 1"),
    "text as step": ({"global_step": "x", "loss": 1.0}, "global_step is 'x', which must be an integer"),
    "text as time": ({"global_step": 2, "timestamp": "x", "loss": 1.0}, "timestamp is 'x', which must be a finite"),
    "infinite time": ({"global_step": 2, "timestamp": float("inf"), "loss": 1.0}, "timestamp is inf, which must be"),
    "tags as list": ({"global_step": 2, "loss": 1.0, "bridge": [1]}, "'bridge' must have columns of one length"),
    "columns of other lengths": (
        {"global_step": 2, "bridge": {"step": [1, 2], "samples": [1], "timestamp": [1.0], "tags": {"a": [1]}}},
        "'bridge' must have columns of one length",
    ),
    "text as tags": (
        {"global_step": 2, "bridge": {"step": [1], "samples": [1], "timestamp": [1.0], "tags": "x"}},
        "'bridge' must have columns of one length",
    ),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_record_that_no_tracker_can_show_is_an_error_that_names_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from onstep.cli.main import main

    record, said = BAD_RECORDS[name]
    path = metrics_log(tmp_path, [loss_at(1), {"timestamp": 1002.0, **record}])
    tracker = Remembering()
    with pytest.raises(MetricsLogError) as caught:
        replay(path, tracker)
    assert f"record 2 of {path}: " in str(caught.value)
    assert said in str(caught.value)
    assert tracker.calls == []
    assert main(["logs", "replay", str(tmp_path), "--to", "csv", "--output", str(tmp_path / "out")]) not in (0, 70)
    assert said[:20] in " ".join(capsys.readouterr().err.split())


def test_a_number_beyond_the_range_of_floats_is_infinite(tmp_path: Path) -> None:
    path = metrics_log(tmp_path, [{"timestamp": 1.0, "global_step": 1, "loss": 10**400, "low": -(10**400)}])
    for name in ("csv", "tensorboard"):
        assert replay(path, make_tracker(name), output=tmp_path) == 1
    assert "inf,-inf" in (tmp_path / "metrics.csv").read_text()
