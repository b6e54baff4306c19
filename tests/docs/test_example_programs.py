"""The programs and notebooks of `examples/` run as they are, in an empty directory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SAYS = {
    "bad_batches": "NonFiniteError",
    "callbacks": "what was decided",
    "compare_optimizers": "runs/optimizers.png",
    "hugging_face": "of the weights opened by transformers",
    "kill_and_resume": "equal, to the last bit",
    "language_model": "loss",
    "lora": "loads into LlamaForCausalLM",
    "own_loss": "z loss",
    "own_model": "accuracy on held-out points: 1.000",
    "steer": "stopped after step",
    "two_processes": "loss on two processes",
    "value_head": "value head",
}
"""What the output of a program contains."""
SHORT = ("own_model", "first_run")
"""What every run of the tests starts; the others are for the long sweeps, as other tests show most of what they do."""


def by_cost(paths: list[Path], short: Sequence[str] = SHORT) -> list[Any]:
    """Test cases of these files, named after them."""
    return [pytest.param(path, id=path.stem, marks=[] if path.stem in short else [pytest.mark.slow]) for path in paths]


@pytest.fixture
def environment(empty_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """That of a program: Onstep's source, one thread, and no window for figures."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return dict(os.environ)


def test_there_are_ten_programs_and_three_notebooks() -> None:
    assert len(PROGRAMS) >= 10
    assert len(NOTEBOOKS) >= 3
    assert {program.stem for program in PROGRAMS} == set(SAYS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_what_it_shows_and_how_to_run_it(program: Path) -> None:
    text = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8")))
    assert text is not None
    assert f"python examples/{program.name}" in text


@pytest.mark.process
@pytest.mark.parametrize("program", by_cost(PROGRAMS))
def test_a_program_runs(program: Path, environment: dict[str, str], empty_dir: Path) -> None:
    more = ["--steps", "40"] if program.stem == "value_head" else []
    command = [sys.executable, str(program), *more]
    done = subprocess.run(command, cwd=empty_dir, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[program.stem] in done.stdout + done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")


@pytest.mark.process
@pytest.mark.parametrize("notebook", by_cost(NOTEBOOKS, ["first_run"]))
def test_a_notebook_runs(notebook: Path, environment: dict[str, str], empty_dir: Path) -> None:
    document = nbformat.read(notebook, as_version=4)
    NotebookClient(document, timeout=120, resources={"metadata": {"path": str(empty_dir)}}).execute()
    assert any(cell.outputs for cell in document.cells if cell.cell_type == "code")
