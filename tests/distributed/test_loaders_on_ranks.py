"""A user's loaders and samplers on two ranks: micro-batches are dealt to the ranks in turn, also after a kill."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes, output_of
from tests.support.jobs.loader_jobs import ROWS

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.loader_jobs"


def run(processes: Processes, directory: Path, ranks: int = 2, **settings: Any) -> list[dict[str, Any]]:
    codes = processes.run(JOBS, "train", directory, settings, ranks=ranks)
    assert codes == [0] * ranks, output_of(directory)
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def dealt(results: list[dict[str, Any]]) -> list[list[float]]:
    """What the ranks read at each step, in the order of the ranks."""
    return [[x for part in parts for x in part] for parts in zip(*(one["steps"] for one in results), strict=True)]


KINDS: dict[str, dict[str, Any]] = {
    "sampler": {"kind": "Weighted"},
    "prepared": {"kind": "Prepared"},
    "distributed-sampler": {"kind": "Distributed"},
    "prepared-stream": {"kind": "PreparedStream", "arguments": {"max_steps": 7}},
    "grouped": {"arguments": {"group_by_length": True}},
    "rebalanced": {"arguments": {"train_sampling_strategy": "batch_rebalance"}},
    "shuffled-stream": {"rows": "shuffled", "arguments": {"max_steps": 7}},
    "split-stream": {"rows": "split", "arguments": {"max_steps": 7}},
}
ALIKE = ("distributed-sampler", "prepared-stream", "grouped", "rebalanced")
"""Kinds that are read in the way of another one."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in ALIKE else []) for kind in KINDS]
)
@pytest.mark.slow
def test_a_killed_run_on_two_ranks_reads_what_the_uninterrupted_one_reads(
    processes: Processes, tmp_path: Path, kind: str
) -> None:
    processes.load("transformers.trainer_pt_utils", "datasets")
    whole = run(processes, tmp_path / "whole", **KINDS[kind])
    killed = tmp_path / "killed"
    assert processes.run(JOBS, "train", killed, {**KINDS[kind], "until": 5}, ranks=2) == [3, 3], output_of(killed)
    rest = run(processes, killed, **KINDS[kind], resume=True)
    for rank in range(2):
        first = json.loads((killed / f"killed-{rank}.json").read_text())
        assert first == whole[rank]["steps"][:5]
        assert rest[rank]["steps"] == whole[rank]["steps"][4:]  # the step that was not saved, again
    assert rest[0]["losses"][-2:] == whole[0]["losses"][-2:]


@pytest.mark.parametrize("kind", ["sampler", "prepared"])
def test_two_ranks_read_the_steps_of_one_with_twice_the_micro_batches(
    processes: Processes, tmp_path: Path, kind: str
) -> None:
    two = run(processes, tmp_path / "two", **KINDS[kind])
    arguments = {**KINDS[kind].get("arguments", {}), "gradient_accumulation_steps": 2}
    (one,) = run(processes, tmp_path / "one", ranks=1, **{**KINDS[kind], "arguments": arguments})
    for step, (both, alone) in enumerate(zip(dealt(two), one["steps"], strict=True)):
        fillers = Counter(both) - Counter(alone)
        assert not Counter(alone) - Counter(both), step
        assert len(fillers) <= (1 if step in (3, 7) else 0), "only the tail of an epoch has a filler"
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two[0]["eval"] == two[1]["eval"] == pytest.approx(one["eval"], rel=1e-5)


def test_a_loader_made_by_hand_has_the_share_of_the_rank(processes: Processes, tmp_path: Path) -> None:
    for kind in ({}, KINDS["sampler"]):
        for result in run(processes, tmp_path / kind.get("kind", "plain"), by_hand=True, **kind):
            first = result["steps"][: len(result["steps"]) // 2]
            assert result["by_hand"] == first


def test_a_stream_split_by_node_is_read_without_repetition_until_a_part_ends(
    processes: Processes, tmp_path: Path
) -> None:
    processes.load("datasets")
    results = run(processes, tmp_path, **KINDS["split-stream"])
    steps = dealt(results)  # parts of 7 and 6 samples
    epoch = Counter(x for step in steps[:3] for x in step)
    assert set(epoch) <= {float(row["x"][0]) for row in ROWS}
    assert max(epoch.values()) == 1
    assert all(len(step) == 4 for step in steps[:3])


@pytest.mark.parametrize(("lengths", "steps"), [([8, 4], 2), ([4, 8], 2), ([4, 5], 2), ([6, 6], 3), ([5, 5], 3)])
def test_the_shortest_iterator_ends_the_training_of_all_ranks(
    processes: Processes, tmp_path: Path, lengths: list[int], steps: int
) -> None:
    first, second = processes.results(JOBS, "iterators", tmp_path, {"lengths": lengths})
    assert first == second
    assert first["step"] == steps
    said = output_of(tmp_path)
    assert ("on all ranks" in said) == (lengths[0] != lengths[1])
    if lengths[0] != lengths[1]:
        shorter = 0 if lengths[0] < lengths[1] else 1
        assert f"the data of rank {shorter} ends after step 2, and that of other ranks does not" in said


def test_the_shortest_loader_ends_the_epoch_of_all_ranks(processes: Processes, tmp_path: Path) -> None:
    results = run(processes, tmp_path, kind="Uneven", arguments={"max_steps": 6})
    assert [len(one["steps"]) for one in results] == [6, 6]
    for one in results:
        assert one["steps"][3:] == one["steps"][:3], "the second epoch begins at its start on every rank"
    assert "the data of rank 0 ends after step 3" in output_of(tmp_path)
