"""The MLflow tracker on a local store, read back with MLflow's client."""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from onstep.errors import DataError
from onstep.trackers import CannotContinueError, RunIdentity
from onstep.trackers.services import mlflow_tracker
from onstep.trackers.services.mlflow_tracker import MlflowTracker
from tests.support.tracker_reading import mlflow_points, mlflow_runs, without_keys


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_keys(monkeypatch, tmp_path)


def identity(directory: Path, config: dict[str, Any] | None = None, **info: Any) -> RunIdentity:
    return RunIdentity("pretty", "run-1", directory, config or {"optimizer": {"lr": 0.5}}, **info)


class Raising:
    """A function that raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *arguments: Any, **options: Any) -> None:
        raise self.error


def only_run(directory: Path, experiment: str = "onstep") -> tuple[Any, Any]:
    client, (run,) = mlflow_runs(directory, experiment)
    return client, run


def test_a_run_is_kept_in_the_runs_directory(tmp_path: Path) -> None:
    tracker = MlflowTracker(tags={"team": "red"}, description="why")
    tracker.open(identity(tmp_path), {})
    tracker.log({"train/loss": 2.0, "throughput/device/tokens_per_sec": 7.0}, 1, 1000.5)
    tracker.log({"train/loss": math.nan}, 2, 1001.5)
    tracker.text("samples/a", "once", 2)
    assert only_run(tmp_path)[1].info.status == "RUNNING"
    tracker.close("completed")
    client, run = only_run(tmp_path)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "pretty")
    (one, nan) = mlflow_points(client, run, "train/loss")
    assert one == (1, 2.0)
    assert math.isnan(nan[1])
    assert client.get_metric_history(run.info.run_id, "train/loss")[0].timestamp == 1000500
    assert mlflow_points(client, run, "throughput/device_tokens_per_sec") == [(1, 7.0)]
    assert run.data.params == {"optimizer.lr": "0.5"}
    assert run.data.tags.items() >= {"team": "red", "mlflow.note.content": "why", "onstep.run_id": "run-1"}.items()
    (text,) = tmp_path.glob("mlruns/**/artifacts/text/samples_a/step-00000002.txt")
    assert text.read_text() == "once"


@pytest.mark.parametrize(
    ("status", "shown"),
    [("completed", "FINISHED"), ("stopped", "FINISHED"), ("preempted", "KILLED"), ("failed", "FAILED")],
)
def test_the_status_is_reported(tmp_path: Path, status: str, shown: str) -> None:
    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    tracker.close(status)
    tracker.close("completed")
    assert only_run(tmp_path)[1].info.status == shown


def test_it_goes_on_in_the_run_that_has_the_id_also_without_a_checkpoint(tmp_path: Path) -> None:
    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    state = tracker.state_dict()
    tracker.close("preempted")
    for start, given in ((4, state), (8, {})):
        tracker = MlflowTracker()
        tracker.open(identity(tmp_path, start_step=start), given)
        assert tracker.state_dict() == state
        assert only_run(tmp_path)[1].info.status == "RUNNING"
        tracker.close("preempted")
    assert only_run(tmp_path)[1].data.tags["onstep.segments"] == "0, 4, 8"


def test_a_metric_file_that_a_kill_left_empty_does_not_end_the_run(tmp_path: Path) -> None:
    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    tracker.log({"train/loss": 1.0}, 1, 1000.0)
    state = tracker.state_dict()
    (metrics,) = (tmp_path / "mlruns").glob("*/*/metrics")
    (metrics / "train" / "grad_norm").touch()
    again = MlflowTracker()
    again.open(identity(tmp_path, start_step=1), state)
    again.log({"train/loss": 2.0}, 2, 1001.0)
    again.close("completed")
    client, found = only_run(tmp_path)
    assert found.info.run_id == state["id"]
    assert mlflow_points(client, found, "train/loss") == [(1, 1.0), (2, 2.0)]


def test_another_run_and_a_deleted_one_are_left_alone(tmp_path: Path) -> None:
    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    state = tracker.state_dict()
    tracker.close("completed")
    tracker.open(RunIdentity("fork", "run-2", tmp_path), state)
    assert tracker.state_dict()["id"] != state["id"]
    tracker.close("completed")
    client, runs = mlflow_runs(tmp_path)
    assert len(runs) == 2
    client.delete_run(state["id"])
    with pytest.raises(CannotContinueError):
        tracker.open(identity(tmp_path), state)
    tracker.open(identity(tmp_path), {})
    assert tracker.state_dict()["id"] != state["id"]
    tracker.close("completed")


def test_parameters_that_changed_on_the_way_are_kept_beside_the_first_ones(tmp_path: Path) -> None:
    tracker = MlflowTracker()
    many = {f"k{n}": n for n in range(230)}
    tracker.open(identity(tmp_path, {"lr": 0.5, **many}), {})
    tracker.close("preempted")
    tracker.open(identity(tmp_path, {"lr": 0.1, "new": "x", **many}, start_step=6), {})
    tracker.close("completed")
    data = only_run(tmp_path)[1].data
    assert (data.params["lr"], data.params["new"], len(data.params)) == ("0.5", "x", 232)
    assert data.tags["onstep.from_step_6.lr"] == "0.1"


def test_an_evaluation_on_its_own_is_no_segment(tmp_path: Path) -> None:
    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    tracker.close("completed")
    tracker.open(identity(tmp_path, start_step=9, adds_only=True), {})
    tracker.log({"eval/loss": 1.0}, 9, 0.0)
    tracker.close("completed")
    client, run = only_run(tmp_path)
    assert run.data.tags["onstep.segments"] == "0"
    assert mlflow_points(client, run, "eval/loss") == [(9, 1.0)]


def test_points_wait_for_each_other_no_longer_than_asked(tmp_path: Path) -> None:
    tracker = MlflowTracker(flush_seconds=10.0)
    now = 0.0
    tracker.clock = lambda: now
    tracker.open(identity(tmp_path), {})

    def recorded() -> int:
        client, run = only_run(tmp_path)
        return len(mlflow_points(client, run, "a")) if "a" in run.data.metrics else 0

    for step, now in ((1, 1.0), (2, 9.0)):  # noqa: B007 - the clock reads it
        tracker.log({"a": 0.0}, step, 0.0)
    assert recorded() == 0
    now = 10.0
    tracker.log({"a": 0.0}, 3, 0.0)
    assert recorded() == 3
    tracker.log({"a": 0.0}, 4, 0.0)
    assert recorded() == 3
    tracker.close("completed")
    assert recorded() == 4


def test_points_that_wait_are_kept_while_the_service_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    tracker = MlflowTracker(flush_seconds=10.0)
    now = 0.0
    tracker.clock = lambda: now
    tracker.open(identity(tmp_path), {})
    tracker.log({"a": 1.0}, 1, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", Raising(MlflowException("too many requests")))
        now = 10.0
        for _ in range(3):
            with pytest.raises(MlflowException, match="too many requests"):
                tracker.log({"a": 2.0}, 2, 0.0)
    tracker.log({"a": 2.0}, 2, 0.0)
    tracker.close("completed")
    client, run = only_run(tmp_path)
    assert mlflow_points(client, run, "a") == [(1, 1.0), (2, 2.0)]


def test_points_that_wait_and_are_refused_do_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
    from mlflow.tracking import MlflowClient

    tracker = MlflowTracker(flush_seconds=10.0)
    now = 0.0
    tracker.clock = lambda: now
    tracker.open(identity(tmp_path), {})
    tracker.log({"a": 1.0}, 1, 0.0)
    with monkeypatch.context() as patch:
        refusal = MlflowException("such a name is not allowed", error_code=INVALID_PARAMETER_VALUE)
        patch.setattr(MlflowClient, "log_batch", Raising(refusal))
        now = 10.0
        with pytest.raises(MlflowException, match="not allowed"):
            tracker.log({"a": 2.0}, 2, 0.0)
    tracker.log({"a": 2.0}, 2, 0.0)
    tracker.close("completed")
    client, run = only_run(tmp_path)
    assert mlflow_points(client, run, "a") == [(2, 2.0)]


def test_store_and_experiment_come_from_the_argument_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "there" / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-environment")
    for tracker in (MlflowTracker(), MlflowTracker("mine", tracking_uri=(tmp_path / "here" / "mlruns").as_uri())):
        tracker.open(identity(tmp_path / "run"), {})
        tracker.close("completed")
    assert only_run(tmp_path / "there", "from-environment")
    assert only_run(tmp_path / "here", "mine")
    assert not (tmp_path / "run").exists()


def test_an_experiment_that_somebody_else_makes_at_the_same_time_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    create = MlflowClient.create_experiment

    def later_than_another(client: MlflowClient, name: str) -> str:
        create(client, name)
        return create(client, name)

    monkeypatch.setattr(MlflowClient, "create_experiment", later_than_another)
    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    tracker.log({"a": 1.0}, 1, 0.0)
    tracker.close("completed")
    client, run = only_run(tmp_path)
    assert mlflow_points(client, run, "a") == [(1, 1.0)]


def test_an_experiment_that_cannot_be_made_is_reported_in_mlflows_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    def refuse(client: MlflowClient, name: str) -> str:
        raise MlflowException("no rights")

    monkeypatch.setattr(MlflowClient, "create_experiment", refuse)
    with pytest.raises(MlflowException, match="no rights"):
        MlflowTracker().open(identity(tmp_path), {})


def test_trackers_that_open_a_new_store_at_once_share_its_experiment(tmp_path: Path) -> None:
    def report(number: int) -> None:
        tracker = MlflowTracker()
        tracker.open(RunIdentity("n", f"run-{number}", tmp_path), {})
        tracker.log({"a": float(number)}, 1, 0.0)
        tracker.close("completed")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(report, range(8)))
    _, runs = mlflow_runs(tmp_path)
    assert sorted(run.data.metrics["a"] for run in runs) == [float(number) for number in range(8)]


def test_a_store_is_searched_again_where_another_run_is_writing_its_first_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    other, search, found = MlflowTracker(), MlflowClient.search_runs, list[Path]()
    other.open(RunIdentity("n", "other", tmp_path), {})
    other.log({"a": 1.0}, 1, 0.0)

    def search_while_it_is_written(client: MlflowClient, *args: Any, **kwargs: Any) -> Any:
        if not found:
            found.extend(tmp_path.glob("mlruns/*/*/metrics/a"))
            content = found[0].read_text()
            found[0].write_text("")
            threading.Timer(0.1, lambda: found[0].write_text(content)).start()
        return search(client, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "search_runs", search_while_it_is_written)
    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    tracker.close("completed")
    other.close("completed")
    assert found


@pytest.mark.parametrize(("content", "age"), [("", 3600.0), ("", 0.0), ("0 one 2\n", 3600.0)])
def test_a_point_that_another_run_left_unwritten_is_removed_or_named(
    content: str, age: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow cannot read a store that has one."""
    monkeypatch.setattr(mlflow_tracker, "_SEARCH_PAUSES", (0.01,))
    other = MlflowTracker()
    other.open(RunIdentity("n", "other", tmp_path), {})
    other.log({"a": 1.0}, 1, 0.0)
    other.close("failed")
    (metric,) = tmp_path.glob("mlruns/*/*/metrics/a")
    metric.write_text(content)
    os.utime(metric, (time.time() - age,) * 2)
    tracker = MlflowTracker()
    if content or not age:
        with pytest.raises(DataError, match=r"mlruns cannot be read .*; remove or repair its metrics, or choose"):
            tracker.open(identity(tmp_path), {})
        assert metric.read_text() == content
    else:
        tracker.open(identity(tmp_path), {})
        tracker.close("completed")
        assert not metric.exists()


def test_what_cannot_be_looked_at_in_a_store_is_left_there(tmp_path: Path) -> None:
    other = MlflowTracker()
    other.open(RunIdentity("n", "other", tmp_path), {})
    other.close("failed")
    (tags,) = tmp_path.glob("mlruns/*/*/tags")
    (tags.parent / "metrics").mkdir(exist_ok=True)
    (tags.parent / "metrics" / "link").symlink_to("nowhere")
    mlflow_tracker.remove_torn_metrics(str(tmp_path / "mlruns"), "mine")
    assert (tags.parent / "metrics" / "link").is_symlink()


def test_the_users_own_active_run_is_left_alone(tmp_path: Path) -> None:
    import mlflow

    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    assert mlflow.active_run() is None
    tracker.close("completed")


def test_a_store_that_has_lost_the_run_gets_the_whole_run_again(tmp_path: Path) -> None:
    tracker = MlflowTracker()
    tracker.open(identity(tmp_path), {})
    tracker.log({"train/loss": 2.0}, 1, 1.0)
    state = tracker.state_dict()
    [run] = (tmp_path / "mlruns").glob(f"*/{state['id']}")
    shutil.rmtree(run)
    with pytest.raises(CannotContinueError, match="is gone"):
        tracker.log({"train/loss": 2.0}, 2, 2.0)
    again = MlflowTracker()
    with pytest.raises(CannotContinueError, match="has no run of run-1"):
        again.open(identity(tmp_path), state)
    again.open(identity(tmp_path), {})
    again.close("completed")
