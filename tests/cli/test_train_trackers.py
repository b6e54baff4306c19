"""`logger.report_to` on the command line, and what `pretrain` says to it."""

from __future__ import annotations

import copy
import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onstep import pretrain
from onstep.callbacks.metric_sinks import MetricSinks
from onstep.config import ConfigContainer, dump_yaml


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    config = copy.deepcopy(tiny_config)
    config.run.output_dir, config.run.save_weights = str(tmp_path / "runs"), False
    config.train.train_iters, config.logger.log_interval, config.logger.report_to = 3, 1, ["csv", "tensorboard"]
    config.scheduler.lr_warmup_iters, config.validation.eval_interval = 1, None
    return config


def train(config: ConfigContainer, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.yaml").write_text(dump_yaml(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "onstep", "train", "run.yaml", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_trackers_that_are_asked_for_have_every_step(config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.report_to = None
    done = train(config, tmp_path, "logger.report_to=[csv,tensorboard]")
    assert done.returncode == 0, done.stderr
    (table,) = (tmp_path / "runs").rglob("metrics.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["kind"] == "train" and row["loss"]] == ["1", "2", "3"]
    reader = EventAccumulator(str(table.parent / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == [1, 2, 3]


def test_an_unknown_tracker_ends_it_before_a_run_is_there(config: ConfigContainer, tmp_path: Path) -> None:
    done = train(config, tmp_path, "logger.report_to=[tensorbaord]")
    assert done.returncode == 1
    assert "logger.report_to='tensorbaord' is no tracker" in done.stderr
    assert "Did you mean 'tensorboard'?" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_pretrain_fills_the_trackers_that_are_asked_for(config: ConfigContainer, tmp_path: Path) -> None:
    config.run.name, config.logger.report_to = "run", ["csv"]
    pretrain(config)
    with (tmp_path / "runs" / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["kind"] == "train" and row["loss"]] == ["1", "2", "3"]


def test_pretrain_with_metric_sinks_fills_them(config: ConfigContainer, tmp_path: Path) -> None:
    config.run.name, config.logger.report_to = "run", ["csv"]
    pretrain(config, callbacks=[MetricSinks("csv")])
    assert (tmp_path / "runs" / "run" / "metrics.csv").exists()
