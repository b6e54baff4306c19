"""A recipe's final learning rate under a peak that the user has lowered; the user's own is kept, and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.cli.config import configuration
from onstep.config import ConfigContainer, resolve
from onstep.errors import ConfigError


def resolved(*words: str) -> ConfigContainer:
    return resolve(configuration([*words], "tiny_gpt")[0], 1)


@pytest.mark.parametrize(
    ("recipe", "lr", "expected"),
    [("tiny_gpt", 1e-5, 1e-6), ("tiny_gpt_finetune", 3e-6, 3e-7), ("tiny_gpt", 3e-4, 3e-4)],
)
def test_it_keeps_its_share_of_a_lower_peak(
    recipe: str, lr: float, expected: float, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = configuration([f"optimizer.lr={lr}"], recipe)
    assert config.optimizer.min_lr == expected
    note = " ".join(capsys.readouterr().err.split())
    assert note.startswith(f"optimizer.min_lr={expected} (not ") or (not note and lr == expected == 3e-4)
    assert note == "" or note.endswith(f"the recipe's share of optimizer.lr={lr}; set it to choose another")


def test_the_peak_of_a_file_counts_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optimizer: {lr: 1e-5}\n")
    assert resolved(str(file)).optimizer.min_lr == 1e-6


@pytest.mark.parametrize("min_lr", [3e-4, 1e-4])
def test_what_the_user_has_given_is_refused(min_lr: float) -> None:
    with pytest.raises(ConfigError, match=rf"min_lr={min_lr} must be at most optimizer.lr=1e-05; lower it"):
        resolved("optimizer.lr=1e-5", f"optimizer.min_lr={min_lr}")


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    resolved("optimizer.lr=1e-5", "logger.console=quiet")
    assert capsys.readouterr().err == ""
