"""A run that is saved on one layout of its ranks and continued on any other is the one that nobody stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes
from tests.support.jobs.sharding_jobs import BATCH

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.pair_jobs"
SAVED, STEPS = 3, 8
LAYOUTS = {
    "one": (1, "bare"),
    "ddp2": (2, "ddp"),
    "fsdp2": (2, "fsdp"),
    "fsdp4": (4, "fsdp"),
    "hsdp4": (4, "hsdp"),
    "distopt2": (2, "distopt"),
    "distopt4": (4, "distopt"),
    "mxfp8 2": (2, "mxfp8"),
}


def runs(processes: Processes, directory: Path, wanted: list[tuple[str, Path]], seed: int) -> list[dict[str, Any]]:
    """Train in directories on layouts; all runs of one number of ranks in the same processes.

    On another layout than that of the directory, the optimizer has its groups in another order.
    """
    found: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2, 4):
        numbers = [number for number, (layout, _) in enumerate(wanted) if LAYOUTS[layout][0] == ranks]
        settings = [
            {
                "how": LAYOUTS[wanted[number][0]][1],
                "directory": str(wanted[number][1]),
                "steps": STEPS,
                "seed": seed,
                "reverses": not wanted[number][1].name.startswith(wanted[number][0]),
                "save_interval": SAVED,
            }
            for number in numbers
        ]
        if settings:
            [results, *others] = processes.results(JOBS, "runs", directory, {"runs": settings}, ranks=ranks)
            assert all(one["losses"] == two["losses"] for of in others for one, two in zip(results, of, strict=True))
            found |= dict(zip(numbers, results, strict=True))
    return [found[number] for number in range(len(wanted))]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("how", "ranks", "is_async"),
    [
        ("distopt", 2, True),
        pytest.param("distopt", 2, False, marks=SLOW),
        pytest.param("distopt 2x2", 4, True, marks=SLOW),
        pytest.param("distopt 2x2", 4, False, marks=SLOW),
    ],
)
def test_a_run_that_overlaps_divided_updates_continues_from_each_of_its_steps_to_the_bit(
    processes: Processes, tmp_path: Path, how: str, ranks: int, is_async: bool
) -> None:
    """Losses, norms, weights and the optimizer's state."""
    common = {"how": how, "steps": STEPS, "reverses": False, "save_interval": 1, "async": is_async}

    def trained(names: list[str], seed: int) -> list[dict[str, Any]]:
        places = [{**common, "seed": seed, "directory": str(tmp_path / name)} for name in names]
        of_ranks = processes.results(JOBS, "runs", tmp_path, {"runs": places}, ranks=ranks)
        assert all(one["end"] == two["end"] for of in of_ranks for one, two in zip(of, of_ranks[0], strict=True))
        return of_ranks[0]

    [whole] = trained(["whole"], seed=0)
    steps = range(1, STEPS)
    for step in steps:
        name = f"checkpoint-{step}"
        shutil.copytree(tmp_path / "whole" / name, tmp_path / f"from {step}" / name)
    for step, found in zip(steps, trained([f"from {step}" for step in steps], seed=1), strict=True):
        assert (found["losses"], found["norms"]) == (whole["losses"][step:], whole["norms"][step:]), step
        assert found["end"] == whole["end"], step


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "layouts",
    [["one", "mxfp8 2"], ["fsdp2", "distopt2"], pytest.param([*LAYOUTS], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_every_ordered_pair(processes: Processes, tmp_path: Path, layouts: list[str]) -> None:
    """Parameters in MXFP8 are float32 in checkpoints, and what reads them rounded computes other losses."""
    whole = dict(
        zip(layouts, runs(processes, tmp_path, [(one, tmp_path / one) for one in layouts], seed=0), strict=True)
    )
    pairs = [(source, target) for source in layouts for target in layouts]
    for source, target in pairs:
        name = f"checkpoint-{SAVED}"
        shutil.copytree(tmp_path / source / name, tmp_path / f"{source}-{target}" / name)
    places = [(target, tmp_path / f"{source}-{target}") for source, target in pairs]
    for (source, target), found in zip(pairs, runs(processes, tmp_path, places, seed=1), strict=True):
        before, after = whole[source], whole[target]
        assert found["first"]["digests"] == before["later"]["digests"], (source, target)
        assert set(found["first"]["steps"].values()) == {float(SAVED)}
        assert found["first"]["groups"] == before["later"]["groups"][:: 1 if source == target else -1]
        assert len(found["losses"]) == STEPS - SAVED
        near = 2e-2 if source.startswith("mxfp8") != target.startswith("mxfp8") else 1e-5
        assert found["losses"] == pytest.approx(after["losses"][SAVED:], rel=near), (source, target)
        assert found["norms"] == pytest.approx(after["norms"][SAVED:], rel=near), (source, target)
        if source == target:
            assert (found["losses"], found["norms"]) == (after["losses"][SAVED:], after["norms"][SAVED:])
        assert sorted(before["seen"][: SAVED * BATCH] + found["seen"]) == sorted(after["seen"]), (source, target)
