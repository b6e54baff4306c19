"""Unmodified scripts under `transformers` and under `onstep run`: the same records, weights and files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.brought import materials
from tests.brought.compare import PROGRAMS, measure
from tests.brought.programs import Program


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materials.make(tmp_path_factory.mktemp("materials"))


def check_installed(program: Program) -> None:
    for package in program.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make brought")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_script_trains_as_with_transformers_and_survives_kills(program: Program, here: Path, tmp_path: Path) -> None:
    check_installed(program)
    row = measure(program, here, tmp_path, kills=2)
    print(row.line())
    assert row.failures() == []
