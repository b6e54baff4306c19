"""`report_to` of a Trainer: which trackers are fed, once, and what Hugging Face's own tracker callbacks see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onstep import Trainer
from onstep.errors import ConfigError
from onstep.trackers import tracker as metric_tracker
from onstep.trackers.trackers_callback import TrackersCallback
from tests.support.small_models import Regression, arguments, regression_rows


def trainer_with(tmp_path: Path, callbacks: list[Any] | None = None, **options: Any) -> Trainer:
    args = arguments(tmp_path, logging_steps=1, **options)
    rows = regression_rows()
    return Trainer(Regression(), args, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)


def metric_trackers(trainer: Trainer) -> list[TrackersCallback]:
    return [callback for callback in trainer.callback_manager.callbacks if isinstance(callback, TrackersCallback)]


def tables(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.rglob("metrics.csv"))


def losses(table: Path) -> list[str]:
    head, *rows = (line.split(",") for line in table.read_text().splitlines())
    column, kind = head.index("loss"), head.index("kind")
    return [row[column] for row in rows if row[kind] == "train" and row[column]]


def test_a_tracker_that_is_asked_for_gets_every_logged_step(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, report_to="csv")
    trainer.train()
    (trackers,) = metric_trackers(trainer)
    assert [tracker.name for tracker in trackers.trackers] == ["csv"]
    (table,) = tables(tmp_path)
    assert len(losses(table)) == 3


def test_without_report_to_nothing_is_attached(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path)
    trainer.train()
    assert metric_trackers(trainer) == []
    assert tables(tmp_path) == []


def test_it_is_attached_once_and_evaluations_reach_it_too(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, report_to=["csv"], save_strategy="no")
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert len(metric_trackers(trainer)) == 1
    (table,) = tables(tmp_path)
    assert "eval_loss" in table.read_text()


def test_a_users_own_metric_trackers_takes_its_place(tmp_path: Path) -> None:
    mine = TrackersCallback(["tensorboard"])
    trainer = trainer_with(tmp_path, [mine], report_to="csv")
    trainer.train()
    assert metric_trackers(trainer) == [mine]
    assert tables(tmp_path) == []


def test_a_missing_package_ends_it_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_tracker, "find_spec", lambda package: None)
    trainer = trainer_with(tmp_path, report_to="wandb")
    with pytest.raises(ConfigError, match=r"pip install 'onstep\[wandb\]'"):
        trainer.train()
    assert not Path(str(trainer.args.output_dir)).exists()


def test_hugging_faces_own_tracker_callbacks_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import TensorBoardCallback

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "theirs"))
    trainer = trainer_with(tmp_path, [TensorBoardCallback()], eval_strategy="steps", eval_steps=2)
    trainer.train()
    reader = EventAccumulator(str(tmp_path / "theirs"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == [1, 2, 3]
    assert [event.step for event in reader.Scalars("eval/loss")] == [2, 3]
    assert [event.step for event in reader.Scalars("train/train_loss")] == [3]


def test_hugging_faces_wandb_callback_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from transformers.integrations import WandbCallback

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    wandb.teardown()  # an earlier test may have read the environment: W&B does so once a process
    trainer = trainer_with(tmp_path, [WandbCallback()], run_name="theirs", project="p")
    try:
        trainer.train()
        assert wandb.run is not None
        assert (wandb.run.name, wandb.run.summary["train/global_step"]) == ("theirs", 3)
    finally:
        wandb.finish()  # else `wandb.run` would stay for the tests that follow
        wandb.teardown()
