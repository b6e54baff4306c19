"""Megatron Bridge's tags in real trackers, killed and continued, on one rank and two, read by their own readers."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes, output_of

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.tracker_jobs"


@pytest.fixture(scope="module", autouse=True)
def imported(processes: Processes) -> None:
    processes.load("mlflow.tracking", "tensorboard.summary.writer.record_writer")


class Runs:
    """Starts and continues the run of a directory."""

    def __init__(self, processes: Processes, directory: Path, corpus: Path, cache: Path) -> None:
        self._processes, self.directory = processes, directory
        self._common = {"corpus": str(corpus), "cache": str(cache)}

    def start(self, *, ranks: int = 1, **settings: Any) -> list[int]:
        return self._processes.run(JOBS, "run", self.directory, {**self._common, **settings}, ranks=ranks)

    def finish(self, *, ranks: int = 1, **settings: Any) -> None:
        codes = self.start(ranks=ranks, **settings)
        assert codes == [0] * ranks, output_of(self.directory)

    def curves(self, directory: str = "tb") -> dict[str, list[int]]:
        """The places of the points of every tag, as TensorBoard shows them."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader = EventAccumulator(str(self.directory / directory), size_guidance={"scalars": 0})
        reader.Reload()
        return {tag: [point.step for point in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.fixture
def runs(processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> Runs:
    return Runs(processes, tmp_path, corpus, token_cache)


def test_every_step_is_shown_once_after_three_kills(runs: Runs) -> None:
    for step in (3, 7, 11):
        assert runs.start(dies_at=step)[0] == -9
    runs.finish()
    curves, over_samples = runs.curves(), runs.curves("tb/vs_samples")
    steps = list(range(1, 13))
    for tag in ("lm loss", "learning-rate", "batch-size", "grad-norm", "loss-scale", "world-size"):
        assert curves[tag] == steps, tag
        assert over_samples[f"{tag} vs samples"] == [8 * step for step in steps], tag
    assert curves["iteration-time"] == [3, 6, 9, 12]
    assert curves["lm loss validation"] == [4, 8, 12]
    assert curves["lm loss test"] == [12]
    assert over_samples["lm loss validation vs samples"] == [32, 64, 96]


def test_mlflow_goes_on_with_the_same_run_at_the_resumed_step(runs: Runs) -> None:
    words = ["logger.mlflow_experiment=tags", "logger.log_world_size_to_tensorboard=false"]
    assert runs.start(words=words, dies_at=7, patience=1.0)[0] == -9
    runs.finish(words=words)
    [mlflow_run] = mlflow_runs(runs.directory / "runs" / "run")
    assert mlflow_run.data.tags["onstep.segments"] == "0, 4"
    assert mlflow_run.info.status == "FINISHED"
    assert mlflow_run.data.metrics["samples vs steps"] == 96
    assert "val/lm loss" in mlflow_run.data.metrics


def mlflow_runs(directory: Path) -> list[Any]:
    import os

    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient((directory / "mlruns").resolve().as_uri())
    experiment = client.get_experiment_by_name("tags")
    return list(client.search_runs([experiment.experiment_id]))


def test_two_ranks_fill_the_trackers_once_and_one_rank_goes_on(runs: Runs) -> None:
    runs.start(ranks=2, words=["logger.console=bridge"], dies_at=7)
    assert runs.curves()["lm loss"] == [1, 2, 3, 4, 5, 6, 7]
    first, last = ((runs.directory / f"rank-{rank}.out").read_text() for rank in (0, 1))
    assert re.findall(r"^Step Time : ", first, re.MULTILINE)
    assert "iteration        6/" not in first
    assert "iteration        6/      12 | consumed samples:           48 |" in last
    assert " global batch size:     8 |" in last
    assert "Step Time" not in last
    runs.finish()
    assert runs.curves()["lm loss"] == list(range(1, 13))
    assert json.loads((runs.directory / "result-0.json").read_text())["loggers"] == ["tensorboard"]


def test_only_the_last_of_two_ranks_has_loggers(runs: Runs) -> None:
    runs.finish(ranks=2)
    results = [json.loads((runs.directory / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    assert [result["loggers"] for result in results] == [[], ["tensorboard"]]
    assert results[0]["run_id"] == results[1]["run_id"] != ""
    curves = runs.curves()
    assert curves["lm loss"] == curves["world-size"] == list(range(1, 13))
    assert curves["lm loss validation"] == [4, 8, 12]


def test_of_two_ranks_the_first_fills_what_shows_both_names_and_goes_on_alone(runs: Runs) -> None:
    words = ["logger.report_to=[csv,tensorboard]", "logger.report_names=[hf,bridge]"]
    runs.start(ranks=2, dies_at=7, words=words)
    runs.finish(ranks=2, words=words)
    results = [json.loads((runs.directory / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    assert [result["loggers"] for result in results] == [["tensorboard"], []]
    [table] = runs.directory.rglob("metrics*.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["lm loss"]] == [str(step) for step in range(1, 13)]
    assert [row["step"] for row in rows if row["loss"]] == ["3", "6", "9", "12"]
    assert [row["step"] for row in rows if row["lm loss validation"]] == ["4", "8", "12"]
    assert runs.curves()["lm loss"] == list(range(1, 13))
    assert runs.curves()["train/loss"] == [3, 6, 9, 12]
    assert runs.curves("tb/vs_samples")["lm loss vs samples"] == list(range(8, 104, 8))


def test_a_memory_report_is_the_largest_over_stages(processes: Processes, tmp_path: Path) -> None:
    assert processes.run(JOBS, "stages", tmp_path, {}, ranks=2) == [0, 0], output_of(tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"result-{rank}.json").read_text())
        assert found == {"mem-gigabytes": 1.5, "mem-count": 2**24 + 2, "mem-other": 1.25}
        assert isinstance(found["mem-count"], int)
