"""Tensor-parallel rows of the table of layouts, whose whole one is `benchmarks/layouts.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layout_names import LAYOUTS, VARIANTS
from layouts import alone_of, compared
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.layout_jobs"
STEPS = 4
PLAIN = ["an empty rank", "tied", "float64", "losses", "dropout"]
ROWS = {
    "tp2": [*PLAIN, "learned positions", "grouped", "groups"],
    "tp2 sp": [*PLAIN, "learned positions", "grouped", "groups", "losses of words", "attention dropout", "lora"],
    "fsdp2 x tp2 sp": ["an empty rank", "tied", "losses"],
    "dp2 x tp2": ["an empty rank"],
    "tp4 sp": ["an empty rank", "losses"],
    "tp2 sp checkpointed": ["plain"],
}
WANTED = sorted({(name, alone_of(layout, name)[1].accumulation) for layout, names in ROWS.items() for name in names})


def rows(processes: Processes, directory: Path, layout: str, variants: list[Any]) -> list[tuple[Any, Any]]:
    settings = {"layout": layout, "variants": variants, "steps": STEPS}
    [found, *_] = processes.results(JOBS, "rows", directory, settings, ranks=LAYOUTS[layout].ranks)
    return [(one, torch.load(directory / f"{number}.pt")) for number, one in enumerate(found)]


@pytest.fixture(scope="module")
def alone(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, Any]]:
    """One process, by the variant and its number of micro-batches."""
    variants = [(name, {"accumulation": number}) for name, number in WANTED]
    found = rows(processes, tmp_path_factory.mktemp("one"), "one", variants)
    return dict(zip(WANTED, found, strict=True))


SHORT = {"tp2 sp", "fsdp2 x tp2 sp"}


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=[] if one in SHORT else [pytest.mark.slow]) for one in ROWS]
)
def test_a_layout_trains_as_one_process_and_sends_and_holds_what_theory_says(
    processes: Processes, tmp_path: Path, alone: dict[tuple[str, int], tuple[Any, Any]], layout: str
) -> None:
    found = rows(processes, tmp_path, layout, [(name, {}) for name in ROWS[layout]])
    for name, row in zip(ROWS[layout], found, strict=True):
        variant = alone_of(layout, name)[1]
        beside = compared(LAYOUTS[layout], VARIANTS[name], alone[name, variant.accumulation], row)
        assert beside.outside(LAYOUTS[layout], VARIANTS[name]) == [], (name, beside)
