"""Each answer of "How do I" works when it is pasted alone, in an empty directory."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from onstep import recipes
from onstep.config import ConfigContainer
from tests.docs.pages import ROOT, Block, blocks

PAGE = ROOT / "docs" / "guide" / "how-do-i.md"
LINES = PAGE.read_text(encoding="utf-8").splitlines()
STARTS = [number for number, line in enumerate(LINES, 1) if line.startswith("### ")]


def examples(language: str, *more: str) -> dict[str, list[Block]]:
    """The blocks of each answer in some languages, by its heading."""
    found = blocks(PAGE, language, *more)
    ends = [*STARTS[1:], len(LINES)]
    return {
        LINES[start - 1].removeprefix("### "): [block for block in found if start < block.line <= end]
        for start, end in zip(STARTS, ends, strict=True)
    }


ANSWERS = examples("python", "bash")
TRAINED = "onstep train run.name=mine train.train_iters=6"


def test_every_answer_has_an_example() -> None:
    assert len(ANSWERS) >= 40
    assert not [question for question, found in examples("python", "bash", "sh").items() if not found]


def is_run(block: Block) -> bool:
    return block.language == "python" or "onstep" in {line.split()[0] for line in block.lines()}


@pytest.mark.parametrize("question", [question for question, found in ANSWERS.items() if any(map(is_run, found))])
def test_an_answer_works_when_it_is_pasted_alone(
    question: str, empty_dir: Path, small_recipe: None, finished_runs: Path
) -> None:
    """Its names are its own, and so are its files."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with patch.dict(os.environ):
        for block in ANSWERS[question]:
            if block.language == "python":
                block.run(namespace)
            elif block.lines()[0] == TRAINED:
                train_once(empty_dir, finished_runs)
                replace(block, code=block.code.removeprefix(TRAINED)).run_commands()
            else:
                block.run_commands()


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run is kept with which many answers begin."""
    return tmp_path_factory.mktemp("finished")


def train_once(empty: Path, finished: Path) -> None:
    """Do what the command `TRAINED` does in an empty directory: it trains the same run in each."""
    assert not (empty / "runs").exists()
    if not (finished / "runs").exists():
        Block(PAGE, 1, TRAINED, "bash").run_commands()
        shutil.copytree(empty / "runs", finished / "runs")
    shutil.copytree(finished / "runs", empty / "runs", dirs_exist_ok=True)


@pytest.fixture
def small_recipe(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers train a transformer of one layer, on a few texts where they choose no others."""
    complete = recipes.tiny_gpt_pretrain_config

    def small() -> ConfigContainer:
        config = complete()
        config.model.num_layers, config.model.hidden_size, config.model.seq_length = 1, 32, 32
        config.dataset.seq_length, config.validation.eval_iters, config.validation.eval_on_start = 32, 1, False
        config.dataset.paths = [str(corpus)]
        return config

    monkeypatch.setattr(recipes, "tiny_gpt_pretrain_config", small)
    monkeypatch.setitem(recipes.RECIPES, "tiny_gpt", small)
