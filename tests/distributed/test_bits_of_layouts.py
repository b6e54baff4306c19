"""Bits of layouts: shards on one rank are plain torch, and a repeated run is the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layout_names import LAYOUTS
from tests.support.exact_steps import bits
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.layout_jobs"
SLOW = pytest.mark.slow


def row(processes: Processes, directory: Path, layout: str, variant: str, steps: int) -> tuple[Any, ...]:
    """Losses, norms and the bits of the weights of a training."""
    settings = {"layout": layout, "variants": [(variant, {})], "steps": steps, "along": None}
    [[found], *_] = processes.results(JOBS, "rows", directory, settings, ranks=LAYOUTS[layout].ranks)
    return found["losses"], found["norms"], bits(torch.load(directory / "0.pt"))


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_shards_on_one_rank_are_plain_torch_to_the_bit(processes: Processes, tmp_path: Path, steps: int) -> None:
    [[by_hand, divided]] = processes.results(JOBS, "of_one", tmp_path, {"steps": steps}, ranks=1)
    assert [divided["losses"], divided["norms"]] == [by_hand["losses"], by_hand["norms"]]
    assert bits(torch.load(tmp_path / "1.pt")) == bits(torch.load(tmp_path / "0.pt"))


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("fsdp", 2),
        ("distopt", 2),
        pytest.param("mxfp8", 2, marks=SLOW),
        pytest.param("hsdp", 4, marks=SLOW),
        pytest.param("distopt 2x2", 4, marks=SLOW),
    ],
)
def test_three_runs_have_one_certificate(processes: Processes, tmp_path: Path, how: str, ranks: int) -> None:
    settings, job = {"how": how, "certify": True}, ("tests.support.jobs.sharding_jobs", "train")
    first, *others = (processes.results(*job, tmp_path / str(number), settings, ranks=ranks) for number in range(3))
    for found in (first, *others):
        for record in found[0]["chain"]:
            del record["rng"], record["chain"]  # generators that nothing seeds or uses here, and a hash of them
    assert len({record["weights"] for record in first[0]["chain"]}) == len(first[0]["losses"])
    assert [found[0] for found in others] == [first[0]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["fsdp2", "hsdp 2x2", "fsdp2 bf16", "distopt2 both", "distopt 2x2 both", "distopt2 MXFP8 both"]
)
@pytest.mark.parametrize("variant", ["dropout", "moe"])
def test_three_trainings_have_the_same_bits(processes: Processes, tmp_path: Path, layout: str, variant: str) -> None:
    first, *others = (row(processes, tmp_path / str(number), layout, variant, 20) for number in range(3))
    assert others == [first, first]
