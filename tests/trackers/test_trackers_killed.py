"""A run that is killed twice goes on in the same run of W&B, MLflow, Comet and Trackio, from the resumed step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from onstep.record import read_records
from tests.support.forked_processes import Processes
from tests.support.tracker_reading import (
    KEYS,
    Points,
    comet_archives,
    mlflow_points,
    mlflow_runs,
    newest,
    trackio_logs,
    wandb_segments,
)
from tests.support.waiting import until
from tests.support.whole_runs import Ranks

pytestmark = pytest.mark.process

JOBS = "tests.support.jobs.killed_tracker_jobs"
TAGS = {"train/loss": "loss", "eval/loss": "eval_loss", "train/learning_rate": "learning_rate"}
STARTS = [0, 3, 9]
"""Checkpoints are saved at every third step of 11; the kills come when steps 5 and 10 are done, before their log."""
ENDS = [4, 9, 11]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Iterator[Ranks]:
    """Starts and continues runs with trackers, which have their home in the directory."""
    root = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        for key in KEYS:
            patch.delenv(key, raising=False)
        patch.setenv("HOME", str(root))
        patch.setenv("TRACKIO_DIR", str(root / "trackio"))
        with closing(Processes("mlflow.tracking", "trackio.run")) as processes:
            yield Ranks(processes, root, JOBS, corpus=str(corpus), cache=str(token_cache))


@pytest.fixture(scope="module")
def run(runs: Ranks) -> Path:
    """The directory of a run that was killed twice and then ended."""
    settings = {"sinks": ["wandb", "mlflow", "comet", "trackio"]}
    return killed(runs, "killed", (5, 10), **settings)


def killed(runs: Ranks, name: str, steps: tuple[int, ...], **settings: Any) -> Path:
    """The directory of a run that is killed after some steps, and continued to its end."""
    for step in steps:
        assert runs.start(name, "watched", ranks=1, kill_after=step, **settings) == [-9], runs.output(name)
    assert runs.start(name, "watched", ranks=1, **settings) == [0], runs.output(name)
    return runs.directory / name / "runs" / "run"


def has_segments(found: list[Points]) -> bool:
    """Whether each process ended where it was killed, and began with what the ones before did not have for certain."""
    starts, ends = [points[0][0] for points in found], [points[-1][0] for points in found]
    return (
        ends == ENDS and starts[0] == 1 and all(start <= end + 1 for start, end in zip(starts[1:], ends, strict=False))
    )


def expected(run: Path, name: str) -> dict[int, float]:
    records = read_records(run / "trainer_logs.json")
    return {record["global_step"]: record[name] for record in records if name in record}


def assert_each_step_once(points: Points, run: Path, name: str) -> None:
    """The newest value of each step is the metrics log's."""
    assert newest(points) == pytest.approx(expected(run, name), rel=1e-9)


@pytest.mark.slow
def test_wandb_has_a_segment_a_process_in_one_run(run: Path) -> None:
    segments = wandb_segments(run)
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    assert {segment.run.run_id for segment in segments} == {run_id}
    assert has_segments([segment.points("train/loss") for segment in segments])
    assert [segment.exit_code for segment in segments] == [None, None, 0]
    for tag, name in TAGS.items():
        assert_each_step_once([point for segment in segments for point in segment.points(tag)], run, name)


@pytest.mark.slow
def test_mlflow_has_one_run_with_its_segments(run: Path) -> None:
    client, (found,) = mlflow_runs(run)
    assert found.info.status == "FINISHED"
    assert found.data.tags["onstep.segments"] == ", ".join(map(str, STARTS))
    for tag, name in TAGS.items():
        assert_each_step_once(mlflow_points(client, found, tag), run, name)


def test_comet_has_an_archive_a_process_of_one_experiment(run: Path) -> None:
    archives = comet_archives(run)
    assert {archive.meta["offline_id"] for archive in archives} == {
        json.loads((run / "run.json").read_text())["run_id"]
    }
    assert {archive.meta["resume_strategy"] for archive in archives} == {"get_or_create"}
    assert has_segments([archive.points("train/loss") for archive in archives])
    assert [archive.others.get("onstep_status") for archive in archives] == [None, None, "completed"]
    for tag, name in TAGS.items():
        assert_each_step_once([point for archive in archives for point in archive.points(tag)], run, name)
    assert [path.suffix for path in (run / "comet").iterdir()] == [".zip"] * 3


def test_trackio_has_one_run(runs: Ranks, run: Path) -> None:
    (rows,) = trackio_logs(runs.directory / "trackio", "onstep", "run").values()
    for tag, name in TAGS.items():
        assert_each_step_once([(row["step"], row[tag]) for row in rows if tag in row], run, name)


def test_trackers_leave_nothing_on_the_console_and_no_process_behind(runs: Ranks, run: Path) -> None:
    assert "wandb:" not in runs.output("killed")
    assert "COMET" not in runs.output("killed")
    until(lambda: not [process for process in psutil.process_iter() if _is_of(process, runs.directory)])


def _is_of(process: psutil.Process, directory: Path) -> bool:
    try:
        is_alive = process.status() != psutil.STATUS_ZOMBIE
        return is_alive and "wandb" in process.name() and process.cwd().startswith(str(directory))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_a_kill_before_the_trackers_have_written_anything_loses_no_step(runs: Ranks) -> None:
    run = killed(runs, "hurried", (5,), sinks=["wandb", "mlflow"], waits=False)
    client, (found,) = mlflow_runs(run)
    for tag, name in TAGS.items():
        assert_each_step_once(mlflow_points(client, found, tag), run, name)
        assert_each_step_once([point for segment in wandb_segments(run) for point in segment.points(tag)], run, name)
