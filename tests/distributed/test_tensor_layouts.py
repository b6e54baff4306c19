"""Rows of the table of layouts that divide tensors or layers; the whole one is `benchmarks/layouts.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layout_names import LAYOUTS, Variant
from layouts import alone_of, compared, variant_of
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.layout_jobs"
PLAIN = ["an empty rank", "tied", "float64", "losses", "dropout", "learned positions", "grouped", "groups"]
OTHERS = ["llama", "llama tied", "llama padded", "qwen2", "qwen3", "one head", "gpt2", "mixtral"]
FURTHER = ["moe", "experts", "experts of float64", "later tokens"]
ROWS = {
    "tp2": [*PLAIN, *FURTHER, "one group", "muon", "Trainer", *OTHERS],
    "tp2 sp": [*PLAIN, *FURTHER, "losses of words", "attention dropout", "lora", "pretrain", "muon", *OTHERS],
    "fsdp2 x tp2 sp": ["llama", "gpt2", "mixtral", "an empty rank", "losses", "one group", "muon", "float64", *FURTHER],
    "fsdp2 x tp2": ["an empty rank", "llama", "Trainer", "float64"],
    "dp2 x tp2": ["an empty rank", "one group", "losses", "float64"],
    "tp4 sp": ["an empty rank", "losses", "one group", "grouped", "float64"],
    "tp2 sp checkpointed": ["plain", "float64"],
    "hsdp 2x2 x tp2 sp": ["losses", "float64"],
    "distopt2 x tp2": [*PLAIN, "moe", "experts of float64", "later tokens", "muon", "Trainer", *OTHERS],
    "distopt2 x tp2 sp": ["losses", "lora", "pretrain", "muon", "float64"],
    **{
        name: ["plain", "tied", "float64"]
        for name in ("pp2", "pp2 ZBV", "pp2 zero bubble", "pp4", "dp2 x pp2", "fsdp2 x pp2")
    },
    "tp2 x pp2": ["plain", "tied", "experts", "grouped", "float64"],
    "distopt2 x pp2": ["plain", "tied", "float64"],
    "distopt2 x tp2 sp both": ["an empty rank", "tied", "losses", "one group", "experts", "float64"],
}


def rows(processes: Processes, directory: Path, layout: str, variants: list[Any], steps: int) -> list[tuple[Any, Any]]:
    settings = {"layout": layout, "variants": variants, "steps": steps}
    ranks = zip(*processes.results(JOBS, "rows", directory, settings, ranks=LAYOUTS[layout].ranks), strict=True)
    return [
        ({**found, "others": others}, torch.load(directory / f"{number}.pt"))
        for number, (found, *others) in enumerate(ranks)
    ]


SHORT = {
    2: [
        ("tp2 sp", name)
        for name in (
            *("an empty rank", "one group", "experts", "later tokens"),
            *("tied", "losses", "dropout", "attention dropout", "one head", "gpt2"),
        )
    ]
    + [("pp2 interleaved", "tied")],
    4: [
        ("fsdp2 x tp2 sp", "losses"),
        ("dp2 x tp2", "losses"),
        ("distopt2 x tp2 sp both", "one group"),
        ("fsdp2 x pp2", "tied"),
    ],
}


def compare(processes: Processes, directory: Path, pairs: list[tuple[str, str]], steps: int) -> None:
    """Hold rows of layouts of as many ranks, and variants, against one process."""
    wanted, names = [alone_of(*pair) for pair in pairs], [name for _, name in pairs]
    assert {reference for reference, _ in wanted} <= {"one", "ddp2", "ddp4"}
    alone: dict[int, tuple[Any, Any]] = {}
    for reference in sorted({reference for reference, _ in wanted}):
        of_reference = [number for number, one in enumerate(wanted) if one[0] == reference]
        variants = [(names[number], options(wanted[number][1])) for number in of_reference]
        place = directory / reference
        alone |= dict(zip(of_reference, rows(processes, place, reference, variants, steps), strict=True))
    trained = [variant_of(*pair) for pair in pairs]
    of_ranks = [(name, {"layout": layout, **options(one)}) for (layout, name), one in zip(pairs, trained, strict=True)]
    found = rows(processes, directory / "ranks", pairs[0][0], of_ranks, steps)
    outside: dict[tuple[str, str], list[str]] = {}
    for number, (layout, name) in enumerate(pairs):
        beside = compared(LAYOUTS[layout], trained[number], alone[number], found[number])
        outside[layout, name] = beside.outside(LAYOUTS[layout], trained[number])
    assert {pair: said for pair, said in outside.items() if said} == {}


def options(variant: Variant) -> dict[str, Any]:
    return {"accumulation": variant.accumulation, "keys": variant.keys}


@pytest.mark.parametrize("ranks", SHORT)
def test_a_layout_trains_as_one_process_and_sends_and_holds_what_theory_says(
    processes: Processes, tmp_path: Path, ranks: int
) -> None:
    compare(processes, tmp_path, SHORT[ranks], 4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ROWS)
def test_each_row_of_the_table_is_as_one_process(processes: Processes, tmp_path: Path, layout: str) -> None:
    compare(processes, tmp_path, [(layout, name) for name in ROWS[layout]], 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "variants"),
    [
        ("tp2 sp", ["losses", "experts", "later tokens", "lora", "dropout", "attention dropout", "muon", "mixtral"]),
        *(
            (layout, ["losses"])
            for layout in ("tp2", "tp4 sp", "dp2 x tp2", "fsdp2 x tp2 sp", "distopt2 x tp2 sp both")
        ),
    ],
)
def test_three_runs_have_the_same_bits(processes: Processes, tmp_path: Path, layout: str, variants: list[str]) -> None:
    found = rows(processes, tmp_path, layout, [(name, {}) for name in variants for _ in range(3)], 20)
    for place, name in enumerate(variants):
        (one, weights), *others = found[3 * place : 3 * place + 3]
        assert len(set(one["losses"])) == 20, name
        for other, its_weights in others:
            assert (other["losses"], other["norms"]) == (one["losses"], one["norms"]), name
            assert all(torch.equal(weights[part], its_weights[part]) for part in weights), name
