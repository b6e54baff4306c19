"""Unmodified scripts under `transformers` and under `onstep run`: the same records, weights and files."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.brought import materials
from tests.brought.compare import PROGRAMS, measure
from tests.brought.outcomes import compare
from tests.brought.programs import DOORS, Program
from tests.brought.running import run


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materials.make(tmp_path_factory.mktemp("materials"))


def check_installed(program: Program) -> None:
    for package in program.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make brought")


@pytest.mark.process
def test_trls_own_script_trains_under_onstep_run_as_with_transformers(here: Path, tmp_path: Path) -> None:
    """The short version: one script, both at the same time."""
    program = next(one for one in PROGRAMS if one.name == "trl-sft")
    check_installed(program)
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda door: run(program, door, here, tmp_path / door), DOORS)
    difference = compare(first, second)
    assert difference.largest <= program.tolerance, difference
    assert difference.missing == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_script_trains_as_with_transformers_and_survives_kills(program: Program, here: Path, tmp_path: Path) -> None:
    check_installed(program)
    row = measure(program, here, tmp_path, kills=2)
    print(row.line())
    assert row.failures() == []
