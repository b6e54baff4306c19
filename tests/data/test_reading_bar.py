"""A bar on a terminal shows how much of a corpus is read; files and quiet runs have none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onstep import pretrain
from onstep.config import ConfigContainer
from tests.console.screen import Terminal

DONE = ("Learning BPE", "Tokenizing")


@pytest.fixture
def fresh(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    """A run whose corpus nobody has read."""
    tiny_config.tokenizer.tokenizer_type, tiny_config.tokenizer.vocab_size = "bpe", 260
    tiny_config.dataset.cache_dir = str(tmp_path / "cache")
    return tiny_config


def test_a_file_has_no_bar(fresh: ConfigContainer, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(fresh)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("level", ["default", "quiet"])
def test_a_terminal_has_bars_unless_it_is_to_be_quiet(
    level: str, fresh: ConfigContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    fresh.logger.console = level
    pretrain(fresh)
    assert [what in terminal.getvalue() for what in DONE] == [level == "default"] * 2
