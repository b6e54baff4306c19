"""The Comet tracker without a network: what is in its archives, also of a process that was killed."""

from __future__ import annotations

import io
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from onstep.trackers import RunIdentity
from onstep.trackers.services.comet_tracker import CometTracker, Segment, finish_segments
from tests.support.tracker_reading import CometArchive, comet_archives, without_keys

RUN_ID = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_keys(monkeypatch, tmp_path)
    monkeypatch.delenv("COMET_LOGGING_CONSOLE", raising=False)


@pytest.fixture
def run(tmp_path: Path) -> RunIdentity:
    return RunIdentity("pretty", RUN_ID, tmp_path, {"optimizer": {"lr": 0.5}}, start_step=3)


def test_without_a_key_the_run_is_recorded_in_an_archive(
    run: RunIdentity, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = CometTracker(project="p", tags=["a"])
    with caplog.at_level(logging.INFO, "onstep"):
        tracker.open(run, {})
    tracker.log({"train/loss": 2.0, "train/nan": float("nan")}, 4, 0.0)
    tracker.log({"train/loss": 1.0}, 5, 0.0)
    tracker.text("samples", "once", 5)
    assert tracker.state_dict() == {"run": RUN_ID, "id": RUN_ID}
    tracker.close("completed")
    tracker.close("completed")
    (archive,) = comet_archives(tmp_path)
    assert archive.points("train/loss") == [(4, 2.0), (5, 1.0)]
    assert archive.parameters["optimizer|lr"] == 0.5
    assert archive.others.items() >= {"Name": "pretty", "onstep_start_step": 3, "onstep_status": "completed"}.items()
    assert (archive.meta["offline_id"], archive.meta["project_name"]) == (RUN_ID, "p")
    assert archive.meta["tags"] == ["a"]
    assert "comet upload" in caplog.text
    assert capfd.readouterr() == ("", "")


def test_nothing_is_printed_if_comet_was_imported_before(
    run: RunIdentity, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `transformers` does, when nobody has told Comet yet what to print."""
    import comet_ml  # noqa: F401

    printed = io.StringIO()
    console = logging.StreamHandler(printed)
    console.setLevel(logging.INFO)
    caplog.set_level(logging.INFO, "comet_ml")
    monkeypatch.setattr(logging.getLogger("comet_ml"), "handlers", [console])
    monkeypatch.delenv("COMET_LOGGING_CONSOLE", raising=False)
    tracker = CometTracker()
    tracker.open(run, {})
    tracker.close("completed")
    assert printed.getvalue() == ""


@pytest.mark.slow
def test_experiments_that_are_open_at_once_have_all_their_points(tmp_path: Path) -> None:
    """Also one that the user began: Comet's constructor would end whatever began last."""
    from comet_ml import OfflineExperiment
    from comet_ml.config.config_api import get_global_experiment

    options = {"log_env_details": False, "log_code": False, "log_git_metadata": False, "auto_output_logging": False}
    users = OfflineExperiment(offline_directory=str(tmp_path / "comet"), display_summary_level=0, **options)
    trackers = {tag: CometTracker() for tag in "abcd"}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: one[1].open(RunIdentity(one[0], one[0] * 32, tmp_path), {}), trackers.items()))
    assert get_global_experiment() is users
    for step in (1, 2, 3):
        for tag, tracker in trackers.items():
            tracker.log({tag: float(step)}, step, 0.0)
        users.log_metric("mine", float(step), step=step)
    for tracker in trackers.values():
        tracker.close("completed")
    users.end()
    found = {archive.meta["offline_id"]: archive for archive in comet_archives(tmp_path)}
    assert len(found) == 5
    for tag in trackers:
        assert found[tag * 32].points(tag) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert found[users.id].points("mine") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_line_ends_and_control_characters_in_names_are_replaced(run: RunIdentity, tmp_path: Path) -> None:
    tracker = CometTracker()
    tracker.open(run, {})
    tracker.log({"train/a\nb\x00": 1.0}, 4, 0.0)
    tracker.close("completed")
    assert comet_archives(tmp_path)[0].metrics == [("train/a_b_", 4, 1.0)]


def test_an_id_that_comet_cannot_have_is_replaced_by_a_stable_one(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        tracker = CometTracker()
        tracker.open(RunIdentity("n", f"{RUN_ID}-bridge", tmp_path), {})
        keys.append(tracker.state_dict()["id"])
        tracker.close("completed")
    assert keys[0] == keys[1] != RUN_ID
    assert keys[0].isalnum()
    assert len(keys[0]) == 32


def left_by_a_kill(directory: Path, content: bytes, key: str = RUN_ID) -> Segment:
    """A segment as it is when its process dies."""
    segment = Segment(directory, key, "p", None, 1000.0)
    (segment.path / "messages.json").write_bytes(content)
    return segment


MESSAGE = (
    b'{"payload":{"metric":{"metricName":"a","metricValue":1.0,"step":1},"local_timestamp":5},"type":"metric_msg"}\n'
)


def test_what_a_killed_process_left_is_archived_up_to_its_last_whole_line(tmp_path: Path) -> None:
    segment = left_by_a_kill(tmp_path, MESSAGE + MESSAGE[:40])
    segment.release()
    (archive,) = finish_segments(tmp_path, RUN_ID)
    assert CometArchive(archive).points("a") == [(1, 1.0)]
    assert CometArchive(archive).meta["offline_id"] == RUN_ID
    assert list(tmp_path.iterdir()) == [archive]
    assert finish_segments(tmp_path, RUN_ID) == []


def test_a_segment_that_is_being_recorded_is_left_alone(tmp_path: Path) -> None:
    segment = left_by_a_kill(tmp_path, MESSAGE)
    assert finish_segments(tmp_path, RUN_ID) == []
    assert segment.path.is_dir()
    segment.release()
    segment.release()
    assert len(finish_segments(tmp_path, RUN_ID)) == 1


def test_other_experiments_are_left_alone(tmp_path: Path) -> None:
    left_by_a_kill(tmp_path, MESSAGE, "f" * 32).release()
    assert finish_segments(tmp_path, RUN_ID) == []


def test_a_process_that_died_before_it_recorded_anything_leaves_nothing(tmp_path: Path) -> None:
    Segment(tmp_path, RUN_ID, "p", None, 0.0).release()
    assert finish_segments(tmp_path, RUN_ID) == []
    assert list(tmp_path.iterdir()) == []


def test_where_archives_go_may_be_chosen(run: RunIdentity, tmp_path: Path) -> None:
    tracker = CometTracker(save_dir=str(tmp_path / "here"))
    tracker.open(run, {})
    tracker.close("failed")
    assert len(list((tmp_path / "here").glob("*.zip"))) == 1
    assert not (tmp_path / "comet").exists()
