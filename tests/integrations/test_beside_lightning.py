"""The same LightningModule by Lightning's own Trainer and by ours, where Lightning is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes
from tests.support.lightning_modules import SCHEDULES

JOBS = "tests.support.jobs.lightning_jobs"
CLOSE = 1e-6
_ON_RANKS = ("error", "error_epoch", "error_step", "train_loss_step", "val_loss", "val_batches")
"""Metrics that both give for all ranks: the others are those of Lightning's first rank, or of batches that it forms
otherwise."""

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
]


@pytest.fixture(scope="module")
def lightning_processes() -> Iterator[Processes]:
    """A server of its own, which has imported Lightning."""
    server = Processes("lightning", "torchmetrics")
    yield server
    server.close()


def difference(processes: Processes, directory: Path, ranks: int = 1, **settings: Any) -> float:
    """The largest difference of any weight, and of any metric that Lightning has; both doors on the same data."""
    found = {}
    for door in ("lightning", "onstep"):
        given = {"door": door, "ranks": ranks, **settings}
        found[door] = processes.results(JOBS, "beside", directory / door, given, ranks=ranks)[0]
    theirs, ours = found["lightning"], found["onstep"]
    names = [one for one in theirs["metrics"] if ranks == 1 or one in _ON_RANKS]
    assert set(names) <= ours["metrics"].keys()
    assert len(names) == (9 if ranks == 1 else len(_ON_RANKS))
    pairs = [*zip(theirs["weights"], ours["weights"], strict=True)]
    pairs += [(theirs["metrics"][name], ours["metrics"][name]) for name in names]
    most = max(abs(a - b) for a, b in pairs)
    print(f"{settings} on {ranks}: largest difference of {len(pairs)} weights and metrics {most:.2g}")
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_and_metrics_are_those_of_lightning(
    lightning_processes: Processes, tmp_path: Path, schedule: str
) -> None:
    assert difference(lightning_processes, tmp_path, schedule=schedule) <= CLOSE


@pytest.mark.parametrize("more", [{"accumulates": 2}, {"clip": 0.1}, {"accumulates": 3, "clip": 0.5}], ids=str)
def test_so_they_are_with_accumulation_and_clipping(
    lightning_processes: Processes, tmp_path: Path, more: dict[str, Any]
) -> None:
    assert difference(lightning_processes, tmp_path, schedule="every-3-steps", **more) <= CLOSE


@pytest.mark.parametrize("schedule", ["none", "plateau"])
def test_so_they_are_on_two_ranks(lightning_processes: Processes, tmp_path: Path, schedule: str) -> None:
    assert difference(lightning_processes, tmp_path, ranks=2, schedule=schedule) <= CLOSE


def test_a_killed_lightning_module_ends_as_the_one_that_nobody_touched(
    lightning_processes: Processes, tmp_path: Path
) -> None:
    [whole] = lightning_processes.results(JOBS, "resumed", tmp_path / "whole", ranks=1)
    for step in (7, 17):
        assert lightning_processes.run(JOBS, "resumed", tmp_path / "killed", {"kills_at": step}) == [-9]
    [killed] = lightning_processes.results(JOBS, "resumed", tmp_path / "killed", ranks=1)
    assert killed == {**whole, "first": 17}
    assert len([one for one in whole["log"] if "error_epoch" in one]) == 2
