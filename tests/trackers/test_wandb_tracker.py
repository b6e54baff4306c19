"""The W&B tracker without a network: what is in its files, and that nobody is asked anything."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from onstep import pretrain
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.trackers import RunIdentity, TrackerFeed, make_tracker
from onstep.trackers.lines import MemoryLines
from onstep.trackers.services.wandb_tracker import WandbTracker, _has_key
from tests.support.tracker_reading import wandb_segments, without_keys


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_keys(monkeypatch, tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _no_service_stays() -> Iterator[None]:
    yield
    import wandb

    wandb.teardown()


@pytest.fixture
def run(tmp_path: Path) -> RunIdentity:
    return RunIdentity("pretty", "0123456789abcdef" * 2, tmp_path, {"optimizer": {"lr": 0.5}, "seed": 1})


def test_without_a_key_the_run_is_recorded_in_files(
    run: RunIdentity, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = WandbTracker(project="p", tags=["a", "b"], group="g")
    with caplog.at_level(logging.INFO, "onstep"):
        tracker.open(run, {})
    tracker.log({"train/loss": 2.0, "train/nan": math.nan}, 1, 1000.5)
    tracker.log({"train/loss": 1.0}, 2, 1001.5)
    tracker.text("samples", "<b>once</b>", 2)
    assert tracker.state_dict() == {"run": run.run_id, "id": run.run_id}
    tracker.close("completed")
    (segment,) = wandb_segments(tmp_path)
    assert segment.points("train/loss") == [(1, 2.0), (2, 1.0)]
    assert math.isnan(segment.points("train/nan")[0][1])
    assert [row["_timestamp"] for row in segment.rows[:2]] == [1000.5, 1001.5]
    assert segment.step_metrics["*"] == "train/global_step"
    assert (segment.run.project, segment.run.display_name, segment.run.run_group) == ("p", "pretty", "g")
    assert list(segment.run.tags) == ["a", "b"]
    assert segment.config["optimizer"] == {"lr": 0.5}
    assert segment.exit_code == 0
    assert "wandb: offline, recording in" in caplog.text
    assert "wandb sync" in caplog.text
    assert capfd.readouterr() == ("", "")


def test_a_text_is_shown_as_it_is(run: RunIdentity, tmp_path: Path) -> None:
    tracker = WandbTracker()
    tracker.open(run, {})
    tracker.text("samples", "<b>once</b>", 2)
    tracker.close("completed")
    wandb_segments(tmp_path)
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert "<pre>&lt;b&gt;once&lt;/b&gt;</pre>" in page.read_text()


def test_line_ends_and_control_characters_in_names_are_replaced(run: RunIdentity, tmp_path: Path) -> None:
    tracker = WandbTracker()
    tracker.open(run, {})
    tracker.log({"train/a\nb\x00": 1.0, "train/\u00fc\ud800": 2.0}, 4, 0.0)
    tracker.text("two\nlines", "once", 4)
    tracker.close("completed")
    (segment,) = wandb_segments(tmp_path)
    assert segment.points("train/a_b_") == [(4, 1.0)]
    assert segment.points("train/\u00fc_") == [(4, 2.0)]
    assert "two_lines" in {name.partition("/")[0] for row in segment.rows for name in row}


@pytest.mark.parametrize(("status", "exit_code"), [("completed", 0), ("stopped", 0), ("preempted", 1), ("failed", 1)])
def test_the_status_is_reported(run: RunIdentity, tmp_path: Path, status: str, exit_code: int) -> None:
    tracker = WandbTracker()
    tracker.open(run, {})
    tracker.close(status)
    tracker.close(status)
    (segment,) = wandb_segments(tmp_path)
    assert segment.exit_code == exit_code


def test_opened_again_it_goes_on_in_the_same_run(run: RunIdentity, tmp_path: Path) -> None:
    tracker = WandbTracker()
    for value in (1.0, 2.0):
        tracker.open(run, tracker.state_dict())
        tracker.log({"train/loss": value}, 1, 0.0)
        tracker.close("completed")
    segments = wandb_segments(tmp_path, num_finished=2)
    assert [segment.run.run_id for segment in segments] == [run.run_id] * 2
    assert [segment.points("train/loss") for segment in segments] == [[(1, 1.0)], [(1, 2.0)]]


def test_a_checkpoint_of_another_run_is_not_written_to(run: RunIdentity, tmp_path: Path) -> None:
    tracker = WandbTracker()
    tracker.open(run, {"run": "another", "id": "its-id"})
    assert tracker.state_dict()["id"] == run.run_id
    tracker.close("completed")
    tracker.open(run, {"run": run.run_id, "id": "chosen-before"})
    assert tracker.state_dict()["id"] == "chosen-before"
    tracker.close("completed")


def test_an_id_that_wandb_cannot_have_is_replaced_by_a_stable_one(run: RunIdentity, tmp_path: Path) -> None:
    odd = RunIdentity("n", "a/b: c?", tmp_path)
    ids = []
    for _ in range(2):
        tracker = WandbTracker()
        tracker.open(odd, {})
        ids.append(tracker.state_dict()["id"])
        tracker.close("completed")
    assert ids[0] == ids[1]
    assert ids[0].isalnum()
    assert len(ids[0]) == 32


def test_a_key_is_found_where_wandb_looks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not _has_key()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert _has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not _has_key()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert _has_key()


def test_disabled_by_the_environment_nothing_is_written(
    run: RunIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = WandbTracker()
    tracker.open(run, {})
    tracker.log({"train/loss": 1.0}, 1, 0.0)
    tracker.close("completed")
    assert wandb_segments(tmp_path, num_finished=0) == []


def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onstep.trackers.tracker.find_spec", lambda name: None)
    for name in ("wandb", "mlflow", "comet", "trackio"):
        with pytest.raises(ConfigError, match=rf"pip install 'onstep\[{name}\]'"):
            make_tracker(name)


def test_behind_its_thread_nothing_is_lost(run: RunIdentity, tmp_path: Path) -> None:
    feed = TrackerFeed(WandbTracker())
    feed.open(run, MemoryLines({"global_step": step, "loss": float(step)} for step in range(200)), None)
    feed.begin_close("completed")
    feed.finish_close(60.0)
    (segment,) = wandb_segments(tmp_path)
    assert segment.points("train/loss") == [(step, float(step)) for step in range(200)]


def test_a_run_that_shows_both_tables_of_names_is_one_run(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    tiny_config.run.name, tiny_config.run.output_dir, tiny_config.run.save_weights = "run", str(tmp_path), False
    tiny_config.logger.report_to, tiny_config.logger.report_names = ["wandb"], ["hf", "bridge"]
    tiny_config.logger.wandb_project, tiny_config.logger.wandb_exp_name = "mine", "named"
    state = pretrain(tiny_config)
    (segment,) = wandb_segments(tmp_path / "run")
    assert state.run_dir is not None
    assert segment.run.run_id == state.run_dir.run_id
    assert (segment.run.project, segment.run.display_name) == ("mine", "named")
    assert [step for step, _ in segment.points("train/loss")] == [4, 8]
    assert [step for step, _ in segment.points("lm loss")] == list(range(1, 9))
    assert [step for step, _ in segment.points("lm loss validation")] == [5, 8]
