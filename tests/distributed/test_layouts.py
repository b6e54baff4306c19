"""A short form of the table of layouts, whose whole one is `benchmarks/layouts.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layout_names import LAYOUTS, VARIANTS
from layouts import alone_of, compared, has_second_run
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.layout_jobs"
STEPS = 4
ROWS = {
    "ddp2": ["an empty rank"],
    "fsdp2": ["an empty rank", "tied", "groups", "moe", "float64", "muon"],
    "hsdp 2x2": ["an empty rank"],
    "distopt2": ["an empty rank"],
    "distopt2 both": ["an empty rank", "tied", "moe", "groups", "muon"],
    "distopt 2x2 both": ["an empty rank"],
    "distopt2 masters": ["pretrain"],
    "fsdp2 last": ["accumulated"],
    "fsdp2 bf16": ["plain"],
    "distopt2 MXFP8": ["an empty rank"],
    "distopt2 MXFP8 both": ["tied"],
}
WANTED = sorted(
    {
        (alone_of(layout, name)[0], name, alone_of(layout, name)[1].accumulation)
        for layout, names in ROWS.items()
        for name in names
    }
)


def rows(
    processes: Processes, directory: Path, layout: str, variants: list[Any], along: Path | None = None
) -> list[tuple[Any, Any]]:
    settings = {"layout": layout, "variants": variants, "steps": STEPS, "along": along and str(along)}
    ranks = zip(*processes.results(JOBS, "rows", directory, settings, ranks=LAYOUTS[layout].ranks), strict=True)
    return [
        ({**found, "others": others}, torch.load(directory / f"{number}.pt"))
        for number, (found, *others) in enumerate(ranks)
    ]


@pytest.fixture(scope="module")
def directory_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def alone(processes: Processes, directory_alone: Path) -> dict[tuple[str, str, int], tuple[Any, Any]]:
    """One process, by its layout, the variant and the number of micro-batches."""
    found: dict[tuple[str, str, int], tuple[Any, Any]] = {}
    for layout in ("one", "one MXFP8"):
        wanted = of_layout(layout)
        variants = [(name, {"accumulation": number}) for _, name, number in wanted]
        found |= zip(wanted, rows(processes, directory_alone / layout, layout, variants), strict=True)
    return found


def of_layout(layout: str) -> list[tuple[str, str, int]]:
    return [one for one in WANTED if one[0] == layout]


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=[pytest.mark.slow] if f"{one} both" in ROWS else []) for one in ROWS]
)
def test_a_layout_trains_as_one_process_and_sends_and_holds_what_theory_says(
    processes: Processes,
    tmp_path: Path,
    alone: dict[tuple[str, str, int], tuple[Any, Any]],
    directory_alone: Path,
    layout: str,
) -> None:
    found = rows(processes, tmp_path, layout, [(name, {}) for name in ROWS[layout]])
    for name, row in zip(ROWS[layout], found, strict=True):
        reference, variant = alone_of(layout, name)
        key = reference, name, variant.accumulation
        along = None
        if has_second_run(layout):
            starts = directory_alone / reference / f"{of_layout(reference).index(key)}-starts.pt"
            [(along, _)] = rows(processes, tmp_path / "along", layout, [(name, {})], starts)
        beside = compared(LAYOUTS[layout], VARIANTS[name], alone[key], row, along)
        assert beside.outside(LAYOUTS[layout], VARIANTS[name]) == [], name


def test_collectives_run_beside_the_computation_with_the_bits_of_those_that_are_awaited(
    processes: Processes, tmp_path: Path
) -> None:
    """A scatter is awaited where the gradients of an earlier micro-batch are added to."""
    [(ours, torchs), *_] = processes.results(JOBS, "beside", tmp_path, {}, ranks=2)
    assert ours == [*torchs[:2], [[True], [False, True]]]
    assert torchs[2] == [[False], [False]]
