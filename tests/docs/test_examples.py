"""What a reader can copy from the documentation works: Python, commands and configuration files."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.cli.config import configuration
from onstep.cli.main import COMMANDS, main
from onstep.config import KEYS, ConfigContainer, merge, parse_yaml, resolve
from onstep.diloco.simulator.reading import from_values
from onstep.recipes import get_recipe
from tests.docs.pages import PAGES, ROOT, Block, blocks

NEEDS = {"lightning.md": "lightning", "trainer.md": "optuna", "on-a-cluster.md": "ray"}
"""Packages that the examples of a page import, and that an environment may lack; `make brought` has Lightning, and
`make ray` has Ray."""
SCRIPTS = ("trl", "sentence-transformers", "dpo", "kto", "reward-models", "grpo")
"""Pages with a script for TRL or sentence-transformers, which `make brought` starts."""
ELSEWHERE = (*SCRIPTS, "how-do-i")
"""Pages that other tests run: each answer of "How do I" runs by itself."""
LONG = ("after-training",)
"""Pages whose examples need more than 20 seconds."""


def all_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page, language)]


def commands() -> list[Any]:
    """Every `onstep` command line in the pages, also those that `torchrun` starts."""
    lines = [(block, line) for block in all_blocks("bash") for line in block.lines()]
    words = [(block, shlex.split(line, comments=True)) for block, line in lines]
    found = []
    for block, command in words:
        if command[:1] == ["torchrun"]:
            command = command[command.index("-m") + 1 :]
        if command[:1] == ["onstep"] and command[1:] != ["--version"]:
            found.append(pytest.param(command[1:], id=f"{block} {' '.join(command[:3])}"))
    return found


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.stem in LONG else [])
        for page in PAGES[1:]
        if blocks(page, "python") and page.stem not in ELSEWHERE
    ],
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, empty_dir: Path) -> None:
    """Of the README, each example runs by itself."""
    needed = NEEDS.get(page.name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    for block in blocks(page, "python"):
        block.run(namespace)


@pytest.mark.parametrize("block", blocks(ROOT / "README.md", "python"), ids=str)
def test_an_example_of_the_readme_runs_by_itself(
    block: Block, empty_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    block.run({"__name__": "__main__"})
    shown = re.search(r"loss (\S+) at the start, (\S+) at the end", "".join(capfd.readouterr()))
    assert shown is not None
    assert float(shown[2]) < float(shown[1])


def test_pages_that_teach_have_examples() -> None:
    taught = {page.name for page in PAGES if blocks(page, "python")}
    assert taught >= {"README.md", "first-run.md", "callbacks.md", "configuration.md", "trainer.md"}


@pytest.mark.parametrize("words", commands())
def test_a_command_names_what_exists(words: list[str], empty_dir: Path) -> None:
    name, *arguments = words
    assert name in COMMANDS
    if name == "launch":
        arguments = _launched(arguments)
        name, *arguments = arguments or [name]
    if name == "train":
        files = [word for word in arguments if word.endswith(".yaml")]
        for file in files:
            Path(file).write_text("run: {recipe: tiny_gpt}\n", encoding="utf-8")
        recipe = _option(arguments, "--recipe")
        _option(arguments, "--import")
        _option(arguments, "--hf-model")
        if _option(arguments, "--without-commands-from") is not None:
            arguments = [word for word in arguments if word != "steered"]  # a run that is not there
        arguments = [word for word in arguments if word != "--control"]
        config, _ = configuration(arguments, recipe)
        assert isinstance(resolve(config), ConfigContainer)
    elif name == "config":
        assert arguments[0] in ("show", "defaults", "explain", "schema")
        if arguments[0] == "explain":
            assert set(arguments[1:]) <= set(KEYS)
        elif arguments[0] == "show":
            configuration(arguments[1:], None)


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_a_configuration_file_is_valid(block: Block) -> None:
    values = parse_yaml(block.code, source=str(block))
    if "sites" in values:  # a scenario of `onstep diloco simulate`
        from_values(values)
        return
    config = get_recipe(values.get("run", {}).get("recipe") or "tiny_gpt")()
    merge(config, values)
    resolve(config)


def _launched(words: list[str]) -> list[str]:
    """The command that a launch starts on each rank; what a launch on a cluster writes is written."""
    words = words[: words.index(">")] if ">" in words else words
    at = words.index("--") if "--" in words else len(words)
    options = words[:at]
    if "--slurm" in options:
        assert main(["launch", *dict.fromkeys(["--print", *options]), *words[at:]]) == 0
    elif "--kubernetes" in options:
        assert main(["launch", *words]) == 0
    return [word.replace("$SLURM_ARRAY_TASK_ID", "0") for word in words[at + 1 :]]


def _option(words: list[str], name: str) -> str | None:
    """Take an option and its value out of a command line."""
    if name not in words:
        return None
    place = words.index(name)
    value = words[place + 1]
    del words[place : place + 2]
    return value
