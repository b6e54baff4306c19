"""The loggers on the state have the methods of their service, as Megatron Bridge's callbacks use them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, pretrain
from onstep.config import ConfigContainer
from tests.support.tracker_reading import comet_archives, wandb_segments, without_keys


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigContainer:
    monkeypatch.chdir(tmp_path)
    without_keys(monkeypatch, tmp_path)
    tiny_config.train.train_iters, tiny_config.run.name, tiny_config.run.output_dir = 3, "mine", str(tmp_path)
    return tiny_config


class Uses(Callback):
    """Calls a function with the state of the run before its first step."""

    def __init__(self, use: Callable[[Any], Any]) -> None:
        self.use = use
        self.seen: Any = None

    def on_train_start(self, context: Any) -> None:
        self.seen = self.use(context.state)


def train_twice(config: ConfigContainer, use: Callable[[Any], Any]) -> list[Any]:
    """Stop a run after its second step and continue it; what `use` has returned in each process's training."""
    seen = []
    for config.train.exit_interval in (2, None):
        with suppress(SystemExit):
            pretrain(config, callbacks=[uses := Uses(use)])
        seen.append(uses.seen)
    return seen


def use_wandb(state: Any) -> Any:
    logger = state.wandb_logger
    logger.config["mine"] = state.train_state.step
    logger.log({"hist": logger.Histogram([1, 2, 3]), "point": 2.5}, step=7)
    logger.summary["best"] = 1.0
    logger.log_artifact(str(Path(__file__)), name="source", type="code")
    return logger.run.id, logger.config["mine"], logger.run.summary["best"]


def test_wandb(config: ConfigContainer, tmp_path: Path) -> None:
    """Values that are not numbers are sent too; a checkpoint, written at the end, holds what can be sent again."""
    wandb = pytest.importorskip("wandb")
    config.logger.wandb_project = "test"
    uses = Uses(use_wandb)
    pretrain(config, callbacks=[uses])
    assert uses.seen[1:] == (0, 1.0)
    (segment,) = wandb_segments(tmp_path / "mine")
    assert segment.run.run_id == uses.seen[0]
    assert segment.points("point") == [(7, 2.5)]
    assert [(row["train/global_step"], row["hist/_type"]) for row in segment.rows if "hist/_type" in row] == [
        (7, "histogram")
    ]
    assert wandb.run is None


def test_wandb_in_the_next_run_of_the_process(config: ConfigContainer, tmp_path: Path) -> None:
    """A continued run is the same run of the tracker, and another run has its own."""
    pytest.importorskip("wandb")
    config.logger.wandb_project = "test"
    first, continued = train_twice(config, use_wandb)
    config.run.name = "other"
    pretrain(config, callbacks=[uses := Uses(use_wandb)])
    assert first[0] == continued[0] != uses.seen[0]
    assert [first[1], continued[1], uses.seen[1]] == [0, 2, 0]


def test_mlflow(config: ConfigContainer, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    (tmp_path / "notes.txt").write_text("mine")

    def use(state: Any) -> Any:
        state.mlflow_logger.log_artifact(str(tmp_path / "notes.txt"))
        state.mlflow_logger.set_tag("colour", state.train_state.step)
        state.mlflow_logger.set_tags({"shape": "round", "size": state.train_state.step})
        state.mlflow_logger.log_params({"corpus": "mine", "shards": 3})

    config.logger.mlflow_experiment, config.logger.mlflow_tracking_uri = "test", (tmp_path / "mlruns").as_uri()
    train_twice(config, use)
    assert [path.read_text() for path in tmp_path.rglob("artifacts/notes.txt")] == ["mine"]
    for written, text in {"tags/colour": "2", "tags/shape": "round", "tags/size": "2", "params/shards": "3"}.items():
        assert [path.read_text() for path in tmp_path.rglob(written)] == [text]


def test_comet(config: ConfigContainer, tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")

    def use(state: Any) -> Any:
        state.comet_logger.log_other("colour", "red")
        return state.comet_logger.get_key()

    config.logger.comet_project = "test"
    first, continued = train_twice(config, use)
    assert first == continued
    assert [archive.others["colour"] for archive in comet_archives(tmp_path / "mine")] == ["red", "red"]


def test_tensorboard(config: ConfigContainer, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config.logger.tensorboard_dir = str(tmp_path / "tb")
    uses = Uses(lambda state: state.tensorboard_logger.add_histogram("mine", torch.ones(2), 0))
    pretrain(config, callbacks=[uses])
    assert any(b"mine" in path.read_bytes() for path in tmp_path.rglob("events.out*"))
