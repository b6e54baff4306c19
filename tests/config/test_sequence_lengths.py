"""The lengths of a sequence in the model and in the data are one: either may be set."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep import pretrain
from onstep.cli.config import configuration
from onstep.config import ConfigContainer, dump_yaml
from onstep.errors import ConfigError
from onstep.recipes import get_recipe


@pytest.mark.parametrize("key", ["model.seq_length", "dataset.seq_length"])
@pytest.mark.parametrize("in_file", [False, True])
def test_one_length_follows_the_other(key: str, in_file: bool, tmp_path: Path) -> None:
    words = [f"{key}=64"]
    if in_file:
        (tmp_path / "config.yaml").write_text(f"{key}: 64\n")
        words = [str(tmp_path / "config.yaml")]
    config, _ = configuration(words, None)
    assert (config.model.seq_length, config.dataset.seq_length) == (64, 64)


def test_a_word_wins_over_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_yaml(get_recipe("tiny_gpt")()))
    config, _ = configuration([str(tmp_path / "config.yaml"), "model.seq_length=64"], None)
    assert (config.model.seq_length, config.dataset.seq_length) == (64, 64)


@pytest.mark.parametrize("section", ["model", "dataset"])
def test_an_attribute_is_followed_too(tiny_config: ConfigContainer, section: str) -> None:
    default = ConfigContainer()
    tiny_config.model.seq_length = tiny_config.dataset.seq_length = default.model.seq_length
    getattr(tiny_config, section).seq_length = 16
    tiny_config.run.recipe = None
    state = pretrain(tiny_config)
    assert (state.cfg.model.seq_length, state.cfg.dataset.seq_length) == (16, 16)


def test_two_lengths_that_differ_are_refused() -> None:
    config, _ = configuration(["model.seq_length=64", "dataset.seq_length=32"], None)
    with pytest.raises(ConfigError, match=r"dataset\.seq_length=32 and model\.seq_length=64 must be the same"):
        pretrain(config)
