"""`logger.report_to` on the command line, and what `pretrain` says to it."""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onstep import pretrain
from onstep.config import ConfigContainer, dump_yaml
from onstep.trackers.trackers_callback import TrackersCallback
from tests.support.forked_processes import Processes
from tests.support.shell import Done, Shell


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    config = copy.deepcopy(tiny_config)
    config.run.output_dir, config.run.save_weights = str(tmp_path / "runs"), False
    config.train.train_iters, config.logger.log_interval, config.logger.report_to = 3, 1, ["csv", "tensorboard"]
    config.scheduler.lr_warmup_iters, config.validation.eval_interval = 1, None
    return config


Train = Callable[..., Done]


@pytest.fixture
def train(processes: Processes, tmp_path: Path) -> Train:
    """`onstep train` with a configuration and words beside it."""

    def run(config: ConfigContainer, *words: str) -> Done:
        (tmp_path / "run.yaml").write_text(dump_yaml(config))
        return Shell(processes, tmp_path).onstep("train", "run.yaml", *words)

    return run


def test_the_trackers_that_are_asked_for_have_every_step(train: Train, config: ConfigContainer, tmp_path: Path) -> None:
    config.logger.report_to = None
    done = train(config, "logger.report_to=[csv,tensorboard]")
    assert done.returncode == 0, done.stderr
    (table,) = (tmp_path / "runs").rglob("metrics.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["kind"] == "train" and row["loss"]] == ["1", "2", "3"]
    reader = EventAccumulator(str(table.parent / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == [1, 2, 3]


def test_an_unknown_tracker_ends_it_before_a_run_is_there(
    train: Train, config: ConfigContainer, tmp_path: Path
) -> None:
    done = train(config, "logger.report_to=[tensorbaord]")
    assert done.returncode == 1
    assert "logger.report_to='tensorbaord' is not a tracker" in done.stderr
    assert "Did you mean 'tensorboard'?" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_settings_of_a_tracker_that_is_not_asked_for_are_named(train: Train, config: ConfigContainer) -> None:
    done = train(config, "logger.wandb_entity=us", "optimizer.sgd_momentum=0.5")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "settings without effect" in line]
    assert "optimizer.sgd_momentum=0.5 (requires optimizer.optimizer=sgd)" in line
    assert "logger.wandb_entity=us (requires logger.report_to=[wandb] or logger.wandb_project)" in line


def test_pretrain_fills_the_trackers_that_are_asked_for(config: ConfigContainer, tmp_path: Path) -> None:
    config.run.name, config.logger.report_to = "run", ["csv"]
    pretrain(config)
    with (tmp_path / "runs" / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["kind"] == "train" and row["loss"]] == ["1", "2", "3"]


def test_pretrain_with_metric_trackers_fills_them(config: ConfigContainer, tmp_path: Path) -> None:
    config.run.name, config.logger.report_to = "run", ["csv"]
    pretrain(config, callbacks=[TrackersCallback("csv")])
    assert (tmp_path / "runs" / "run" / "metrics.csv").exists()
