"""All that a run reports: the points of its trackers, its logs and record, and what is printed about it."""

from __future__ import annotations

import csv
import json
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from onstep.record import read_records
from tests.support.tracker_files import scalars
from tests.support.tracker_reading import comet_archives, mlflow_points, mlflow_runs, trackio_logs, wandb_segments

Lines = list[Any]

OF_CLOCKS = ("*timestamp", "*_at", "*[-_]time", "*runtime", "process duration", "*_per_sec*", "time/*", "seconds_*")
OF_CLOCKS += ("goodput", "mfu", "flops_per_second", "throughput/tflops*")
COUNTS = ("time/tokens", "time/samples", "time/batches")
OF_RANKS = ("num_ranks", "world-size", "place", "parallel*", "position", "digest", "onstep.run_id", "*logging_dir")
"""What says which and how many ranks there were, or is a position in or a hash of a file that does."""
_PRINTED = (
    (r"\S*/(?=runs/run\b)", ""),
    (r"\d{4}-\d\d-\d\d|\d\d:\d\d(:\d\d)?|\(\d+\.\d+, \d+\.\d+\)|\d+\.\d%", "TIME"),
    (r"(?i)((/sec|per[_ ]second\w*|seconds_\w+|mfu|goodput|runtime):\s*|\(ms\): |Time : )[\d.e+-]+( ?s)?", r"\1TIME"),
    (r"(\(TFLOP/s/GPU\): |utilization: |throughput: )[\d.]+", r"\1RATE"),
    (r"# GPUs: \d+", "RANKS"),
    (r"Theoretical memory footprints: .*", "MEMORY"),
    (r"(?m)\s+$", ""),
)
"""What a line has of the clock, of the ranks, their number and memory, and of the directory, and what stands for it."""


def close(value: Any) -> Any:
    """The same with room for rounding in each float."""
    if isinstance(value, dict):
        return {key: close(one) for key, one in value.items()}
    if isinstance(value, list):
        return [close(one) for one in value]
    return pytest.approx(value, rel=1e-5, nan_ok=True) if isinstance(value, float) else value


def masked(value: Any) -> Any:
    """The same without times and what names ranks."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if not _matches(key, OF_RANKS)}
        return {key: "TIME" if _matches(key, OF_CLOCKS) else masked(one) for key, one in kept.items()}
    if isinstance(value, str):
        return re.sub(r"\S*/(?=runs/run\b)", "", value)
    return [masked(one) for one in value] if isinstance(value, list) else value


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    plain = re.sub(r"^(train|eval|test)/| vs samples$", "", name)
    return name not in COUNTS and any(fnmatchcase(plain, one) for one in patterns)


def printed(text: str) -> Lines:
    """The lines of a text as words and numbers, without times."""
    for pattern, instead in _PRINTED:
        text = re.sub(pattern, instead, text)
    return [[_number(word) for word in line.split()] for line in text.splitlines()]


def _number(word: str) -> float | str:
    with suppress(ValueError):
        return float(word)
    return word


def reported(run: Path, tensorboard: Path, store: Path) -> dict[str, Lines]:
    """The lines of each report of a run of two starts.

    Args:
        run: the directory of the run.
        tensorboard: that of its TensorBoard.
        store: that of Trackio.
    """
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    client, [mlflow] = mlflow_runs(run)
    segments, archives = wandb_segments(run, 2), comet_archives(run)
    table = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    found: dict[str, Lines] = {
        "csv": [list(table[0]), *({name: _number(cell) for name, cell in row.items()} for row in table)],
        "tensorboard": _points(scalars(tensorboard)) + _points(scalars(tensorboard / "vs_samples")),
        "wandb": [row for one in segments for row in (*one.rows, one.config, one.step_metrics, one.exit_code)],
        "mlflow": _points({name: mlflow_points(client, mlflow, name) for name in mlflow.data.metrics}),
        "mlflow run": [dict(mlflow.data.params), dict(mlflow.data.tags), mlflow.info.status],
        "comet": [{tag: value, "step": step} for one in archives for tag, step, value in one.metrics],
        "comet run": [of_run for one in archives for of_run in (one.parameters, one.others)],
        "trackio": trackio_logs(store, "onstep", "run")[run_id],
        "progress.txt": printed((run / "checkpoints" / "progress.txt").read_text()),
    }
    for path in sorted([*run.glob("*.jsonl"), *run.glob("trainer_logs*"), *run.glob("*_norms.json")]):
        lines = read_records(path) if path.suffix == ".json" else map(json.loads, path.read_text().splitlines())
        found[path.name] = list(lines)
    return found


def _points(curves: dict[str, list[tuple[int, float]]]) -> Lines:
    return [{tag: value, "step": step} for tag, points in sorted(curves.items()) for step, value in points]
