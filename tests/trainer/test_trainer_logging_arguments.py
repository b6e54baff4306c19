"""Arguments about what is logged and saved, each with its effect."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from onstep import JsonLogger, TrainerCallback, TrainingArguments
from onstep.trainer.feature import replica_level
from tests.support.small_models import Regression, arguments, quiet, regression_rows


class Level(TrainerCallback):
    """Notes the level of Onstep's messages during training."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.add(logging.getLogger("onstep").level)


def trained(directory: Path, callbacks: Any = None, **options: Any) -> Any:
    trainer = quiet(Regression(), arguments(directory, **options), regression_rows(12), callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("name", "level"), [("debug", logging.DEBUG), ("error", logging.ERROR)])
def test_log_level_is_that_of_the_messages_during_training(tmp_path: Path, name: str, level: int) -> None:
    before, seen = logging.getLogger("onstep").level, Level()
    trained(tmp_path, [seen], log_level=name)
    assert seen.seen == {level}
    assert logging.getLogger("onstep").level == before


def test_log_level_replica_is_that_of_ranks_that_do_not_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    log = logging.getLogger("onstep")
    before = log.level
    with replica_level(TrainingArguments(str(tmp_path), log_level_replica="error")):
        assert log.level == before, "the first rank of a machine reports"
    with replica_level(TrainingArguments(str(tmp_path), log_level_replica="error", log_on_each_node=False)):
        assert log.level == logging.ERROR
    assert log.level == before


def test_the_metrics_log_is_written_to_logging_dir(tmp_path: Path) -> None:
    trained(tmp_path, [JsonLogger()], logging_dir=str(tmp_path / "elsewhere"), logging_steps=1)
    records = json.loads((tmp_path / "elsewhere" / "trainer_logs.json").read_text())
    assert len([one for one in records if "loss" in one]) == 3
    assert not (tmp_path / "run" / "trainer_logs.json").exists()


def components(trainer: Any) -> set[str]:
    manifest = json.loads((Path(trainer._get_output_dir(None)) / "checkpoint-3" / "manifest.json").read_text())
    return set(manifest["components"])


def test_save_only_model_saves_no_optimizer_scheduler_and_random_generators(tmp_path: Path) -> None:
    everything = components(trained(tmp_path / "all"))
    less = components(trained(tmp_path / "less", save_only_model=True))
    assert everything - less >= {"optimizer", "scheduler", "rng"}
    assert "model" in less


def test_checkpoint_components_are_what_is_saved(tmp_path: Path) -> None:
    assert components(trained(tmp_path, checkpoint_components=["model", "trainer"])) == {"model", "trainer", "loop"}


def test_save_total_limit_keeps_the_newest(tmp_path: Path) -> None:
    trainer = trained(tmp_path, save_steps=1, save_total_limit=2)
    found = {path.name for path in Path(trainer._get_output_dir(None)).glob("checkpoint-*")}
    assert found == {"checkpoint-2", "checkpoint-3"}
