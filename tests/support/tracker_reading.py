"""What trackers keep without a network, read with their own readers: each value with the step it is of, in order."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.support.waiting import PATIENCE, until

Points = list[tuple[int, float]]

KEYS = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "COMET_API_KEY", "COMET_PROJECT_NAME")
KEYS += ("COMET_OFFLINE_DIRECTORY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_SPACE_ID")
KEYS += ("WANDB_SERVICE",)  # an earlier test's service, which would not let go of the run of a process that was killed


def without_keys(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The environment of somebody who has never logged in anywhere."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))


def newest(points: Points) -> dict[int, float]:
    """The newest value of each step."""
    return dict(points)


class WandbSegment:
    """A `.wandb` file, whole or cut short, decoded with W&B's own messages.

    The file is a LevelDB log: blocks of 32 kB with records of (checksum, length, kind), then the bytes.
    """

    def __init__(self, path: Path) -> None:
        from wandb.proto import wandb_internal_pb2

        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.run: Any = None
        self.exit_code: int | None = None
        self.step_metrics: dict[str, str] = {}
        for data in _leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            self._take(record)

    def _take(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            self.rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
        elif kind == "run" and self.run is None:
            self.run = record.run
        elif kind == "exit":
            self.exit_code = record.exit.exit_code
        elif kind == "metric":
            self.step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric

    def points(self, tag: str) -> Points:
        return [(row["train/global_step"], float(row[tag])) for row in self.rows if tag in row]

    @property
    def config(self) -> dict[str, Any]:
        updates = self.run.config.update
        return {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in updates}


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    position, whole = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part = data[position + 7 : position + 7 + length]
        if kind == 0 or len(part) < length:
            return  # cut short
        position += 7 + length
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            yield whole


def wandb_segments(directory: Path, num_finished: int = 1) -> list[WandbSegment]:
    """The segments of a run that were recorded offline, oldest first; `num_finished` of them must have come to an end.

    W&B's process writes the end of a file after `finish` has returned.
    """

    def whole() -> list[WandbSegment]:
        found = [WandbSegment(path) for path in directory.glob("wandb/offline-run-*/run-*.wandb")]
        return found if sum(one.exit_code is not None for one in found) >= num_finished else []

    found = until(whole) if num_finished else []
    return sorted(found, key=lambda one: (one.run.start_time.seconds, one.run.start_time.nanos))


def mlflow_runs(directory: Path, experiment: str = "onstep") -> tuple[Any, list[Any]]:
    """MLflow's client for the store in `directory`, and the runs of an experiment."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(directory / "mlruns").as_uri())
    found = client.get_experiment_by_name(experiment)
    return client, client.search_runs([found.experiment_id])


def mlflow_points(client: Any, run: Any, name: str) -> Points:
    """All points of a metric in the order they were recorded."""
    return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]


class CometArchive:
    """An archive for `comet upload`; each message has passed Comet's own validators."""

    def __init__(self, path: Path) -> None:
        from comet_ml import schemas

        with ZipFile(path) as file:
            self.meta = json.loads(file.read("experiment.json"))
            lines = file.read("messages.json").splitlines()
        schemas.get_experiment_file_validator().validate(self.meta)
        self.metrics: list[tuple[str, int, float]] = []
        self.parameters: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        for message in map(json.loads, lines):
            self._take(message["type"], message["payload"], schemas)

    def _take(self, kind: str, payload: dict[str, Any], schemas: Any) -> None:
        if kind == "metric_msg":
            schemas.get_metric_msg_validator().validate(payload)
            metric = payload["metric"]
            self.metrics.append((metric["metricName"], metric["step"], float(metric["metricValue"])))
        elif kind == "parameter_msg":
            schemas.get_parameter_msg_validator().validate(payload)
            one = payload.get("param") or payload["params"]
            self.parameters[one["paramName"]] = one["paramValue"]
        elif kind == "log_other":
            self.others[payload["key"]] = payload["value"]

    def points(self, tag: str) -> Points:
        return [(step, value) for name, step, value in self.metrics if name == tag]


def comet_archives(directory: Path) -> list[CometArchive]:
    """The archives of a run, oldest first."""
    found = [CometArchive(path) for path in directory.glob("comet/*.zip")]
    return sorted(found, key=lambda one: one.meta["start_time"])


def trackio_logs(store: Path, project: str, run: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each Trackio run of a name, by its id, as Trackio's own storage gives them."""
    code = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as Store
project, name = sys.argv[1:]
records = [one for one in Store.get_run_records(project) if one["name"] == name]
print(json.dumps({one["id"]: Store.get_logs(project, name, run_id=one["id"]) for one in records}))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(store)}
    command = [sys.executable, "-c", code, project, run]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE)
    logs: dict[str, list[dict[str, Any]]] = json.loads(answer.stdout.splitlines()[-1])
    return logs
