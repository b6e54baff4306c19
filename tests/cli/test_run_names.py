"""A run's name, below `runs/`, works wherever the path of a run does."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep import pretrain
from onstep.callbacks import JsonLogger, ParameterNormLogger
from onstep.cli.config import configuration
from onstep.cli.main import main
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from tests.support.small_configs import small_pretrain_config


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Path:
    """A directory with the run `runs/mine`."""
    directory = tmp_path_factory.mktemp("names")
    config: ConfigContainer = small_pretrain_config(corpus, token_cache)
    config.run.name, config.run.output_dir = "mine", str(directory / "runs")
    config.train.train_iters, config.train.global_batch_size, config.validation.eval_iters = 8, 4, 1
    config.logger.log_interval = config.validation.eval_interval = 4
    pretrain(config, callbacks=[JsonLogger(), ParameterNormLogger()])
    return directory


@pytest.mark.parametrize(
    "words",
    [
        ["why", "NAME"],
        ["why", "--features", "NAME"],
        ["checkpoint", "list", "NAME"],
        ["checkpoint", "verify", "NAME"],
        ["logs", "summary", "NAME"],
        ["logs", "tail", "NAME"],
        ["config", "show", "NAME"],
        ["memory", "NAME"],
        ["recipes", "show", "NAME"],
        ["plot", "heatmap", "NAME", "-o", "heat.png"],
    ],
)
def test_commands_find_a_run_by_its_name_and_suggest_the_nearest(
    place: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    for name in ("mine", "runs/mine"):
        assert main([word.replace("NAME", name) for word in words]) == 0, capsys.readouterr().err
    assert main([word.replace("NAME", "mien") for word in words]) == 1
    assert "Did you mean 'mine'?" in capsys.readouterr().err


def test_a_run_named_in_the_place_of_a_file_is_its_configuration(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    config, _ = configuration(["mine", "optimizer.lr=0.5"], None)
    assert (config.run.name, config.optimizer.lr, config.train.train_iters) == ("mine", 0.5, 8)
    with pytest.raises(ConfigError, match=r"nor a run or a recipe\. Did you mean 'mine'\?"):
        configuration(["mien"], None)


def test_a_recipe_named_in_the_place_of_a_file_is_that_recipe_unless_a_run_has_the_name(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = configuration(["tiny_moe", "optimizer.lr=0.5"], None)
    assert (config.run.recipe, config.optimizer.lr, config.model.num_moe_experts) == ("tiny_moe", 0.5, 8)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny_moe").symlink_to(place / "runs" / "mine")
    config, _ = configuration(["tiny_moe"], None)
    assert (config.run.name, config.model.num_moe_experts) == ("mine", None)


@pytest.mark.parametrize("key", ["load", "pretrained_checkpoint"])
def test_checkpoints_to_start_from_are_found_by_the_name_of_their_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.chdir(place)
    config, _ = configuration([f"checkpoint.{key}=mine"], None)
    assert getattr(config.checkpoint, key) == "runs/mine"
    config, _ = configuration([f"checkpoint.{key}=elsewhere/model"], None)
    assert getattr(config.checkpoint, key) == "elsewhere/model"
