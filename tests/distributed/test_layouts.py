"""A short form of the table of layouts, whose whole one is `benchmarks/layouts.py`."""

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
ROWS = {
    "ddp2": ["an empty rank"],
    "fsdp2": ["an empty rank", "tied", "groups", "moe", "float64", "muon"],
    "hsdp 2x2": ["an empty rank"],
    "fsdp2 last": ["accumulated"],
    "fsdp2 bf16": ["plain"],
}


def rows(processes: Processes, directory: Path, layout: str, variants: list[Any]) -> list[tuple[Any, Any]]:
    settings = {"layout": layout, "variants": variants, "steps": STEPS}
    [found, *_] = processes.results(JOBS, "rows", directory, settings, ranks=LAYOUTS[layout].ranks)
    return [(one, torch.load(directory / f"{number}.pt")) for number, one in enumerate(found)]


@pytest.fixture(scope="module")
def alone(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], tuple[Any, Any]]:
    """One process, by variant and number of micro-batches."""
    wanted = {(name, alone_of(layout, name)[1].accumulation) for layout, names in ROWS.items() for name in names}
    variants = [(name, {"accumulation": number}) for name, number in sorted(wanted)]
    return dict(zip(sorted(wanted), rows(processes, tmp_path_factory.mktemp("one"), "one", variants), strict=True))


@pytest.mark.parametrize("layout", ROWS)
def test_a_layout_trains_as_one_process_and_sends_and_holds_what_theory_says(
    processes: Processes, tmp_path: Path, alone: dict[tuple[str, int], tuple[Any, Any]], layout: str
) -> None:
    found = rows(processes, tmp_path, layout, [(name, {}) for name in ROWS[layout]])
    for name, row in zip(ROWS[layout], found, strict=True):
        one = alone[name, alone_of(layout, name)[1].accumulation]
        beside = compared(LAYOUTS[layout], VARIANTS[name], one, row)
        assert beside.outside(LAYOUTS[layout], VARIANTS[name]) == [], name
