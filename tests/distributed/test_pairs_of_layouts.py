"""A run that is saved on one layout of its ranks and continued on any other is the one that nobody stopped."""

from __future__ import annotations

import random
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from layout_names import IN_BF16, IN_MXFP8, MASTERS
from layout_names import LAYOUTS as OF_TABLE
from tests.support.forked_processes import Processes, output_of
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


INEXACT = {IN_BF16, IN_MXFP8, MASTERS, "train.torch_compile=true"}
ROWS: dict[str, tuple[int, list[str]]] = {
    name: (layout.ranks, [*layout.keys]) for name, layout in OF_TABLE.items() if INEXACT.isdisjoint(layout.keys)
}
"""The number of ranks of each layout, and its keys."""
ROWS |= {
    "pp2 uneven": (2, [*ROWS["pp2"][1], "parallel.pipeline_model_parallel_layout=[1,3]"]),
    "dp2 x pp2 interleaved": (4, ROWS["pp2 interleaved"][1]),
    "tp2 sp x pp2": (4, [*ROWS["pp2"][1], *ROWS["tp2 sp"][1]]),
    "tp2 sp x pp2 ZBV": (4, [*ROWS["pp2 ZBV"][1], *ROWS["tp2 sp"][1]]),
    "tp2 sp x pp2 interleaved": (4, [*ROWS["pp2 interleaved"][1], *ROWS["tp2 sp"][1]]),
    "fsdp2 x pp2 1F1B": (4, [*ROWS["pp2"][1], *ROWS["fsdp2"][1]]),
    "fsdp2 x pp2 ZBV": (4, [*ROWS["pp2 ZBV"][1], *ROWS["fsdp2"][1]]),
    "fsdp2 x tp2 sp x pp2": (8, [*ROWS["pp2"][1], *ROWS["fsdp2 x tp2 sp"][1]]),
    "distopt2 x tp2 sp x pp2 interleaved": (8, [*ROWS["pp2 interleaved"][1], *ROWS["distopt2 x tp2 sp"][1]]),
}
DIVIDED = [name for name in ROWS if any(part.startswith(("tp", "pp")) for part in name.split())]
"""Those of tensors and of stages."""
LEG, AT_ONCE = 2, 8
"""Steps that a layout trains before the next one continues; runs in one start of the ranks."""


def relayed(processes: Processes, directory: Path, relays: list[list[str]], pick: random.Random) -> None:
    """Each relay of layouts trains with the losses and norms of one process."""
    steps = LEG * max(map(len, relays))
    common = {"steps": steps, "leg": LEG}
    [whole] = trained(processes, directory, [("one", {**common, "leg": None, "directory": "whole"})])
    for leg in range(max(map(len, relays))):
        wanted = [
            (relay[leg], {**common, "directory": str(at), "seed": leg, "async": pick.random() < 0.5})
            for at, relay in enumerate(relays)
            if leg < len(relay)
        ]
        for (name, run), found in zip(wanted, trained(processes, directory, wanted), strict=True):
            for kind in ("losses", "norms"):
                expected = pytest.approx(whole[kind][LEG * leg : LEG * (leg + 1)], rel=1e-5)
                assert found[kind] == expected, (relays[int(run["directory"])], leg, name, kind)


def trained(processes: Processes, directory: Path, wanted: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Train on layouts, several runs of one number of ranks in the same processes."""
    found: dict[int, dict[str, Any]] = {}
    for ranks in (1, 2, 4, 8):
        of_size = [number for number, (name, _) in enumerate(wanted) if ROWS[name][0] == ranks]
        for first in range(0, len(of_size), AT_ONCE):
            numbers = of_size[first : first + AT_ONCE]
            runs = [{"seed": 0, "async": False, **wanted[at][1], "keys": ROWS[wanted[at][0]][1]} for at in numbers]
            [results, *others] = processes.results(JOBS, "legs", directory, {"runs": runs}, ranks=ranks)
            assert all(other == results for other in others)
            found |= dict(zip(numbers, results, strict=True))
    return [found[number] for number in range(len(wanted))]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_pairs_of_all_layouts_drawn_at_random(processes: Processes, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1000)  # pytest sets that of `random`
    pick = random.Random(seed)
    pairs = pick.sample([[one, other] for one in ROWS for other in ROWS if one != other], 40)
    print(f"\n40 pairs of {len(ROWS)} layouts, seed {seed}: {'; '.join(' to '.join(pair) for pair in pairs)}")
    relayed(processes, tmp_path, pairs, pick)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_layouts_of_tensors_and_stages_go_to_one_process_and_back(processes: Processes, tmp_path: Path) -> None:
    print(f"\n{len(DIVIDED)} layouts")
    relayed(processes, tmp_path, [[name, "one", name] for name in DIVIDED], random.Random(0))


@pytest.mark.parametrize("names", [["tp2 x pp2"], pytest.param(DIVIDED, marks=SLOW)], ids=len)
def test_a_checkpoint_of_one_process_is_the_same_files_after_another_layout(
    processes: Processes, tmp_path: Path, names: list[str]
) -> None:
    source = tmp_path / "source"
    trained(processes, tmp_path, [("one", {"directory": str(source), "steps": LEG, "leg": LEG})])

    def copied(name: str, start: Path, target: Path) -> dict[str, str]:
        ranks, keys = ROWS[name]
        settings = {"keys": keys, "source": str(start), "target": str(target)}
        codes = processes.run(JOBS, "copies", tmp_path, settings, ranks=ranks)
        assert codes == [0] * ranks, output_of(tmp_path)
        [saved] = target.glob("checkpoint-*")
        files = [one for part in ("model", "optimizer") for one in sorted((saved / part).iterdir())]
        return {str(one.relative_to(saved)): sha256(one.read_bytes()).hexdigest() for one in files}

    before = copied("one", source, tmp_path / "before")
    for name in names:
        there = copied(name, source, tmp_path / f"{name} there")
        assert there.keys() != before.keys()
        assert copied("one", tmp_path / f"{name} there", tmp_path / f"{name} back") == before, name
