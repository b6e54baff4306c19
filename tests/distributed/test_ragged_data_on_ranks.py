"""Data that ends at different places on the ranks: training ends there on all, and no rank waits for another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked_processes import Processes, output_of
from tests.support.jobs.ragged_jobs import ROWS, text_rows
from tests.support.small_runs import TinyModel

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.ragged_jobs"
MUST_BE_THE_SAME = "so the stream must be the same on all ranks"


def status_in(directory: Path) -> Any:
    return json.loads((directory / "run" / "run.json").read_text())["status"]


TRAINED: dict[str, dict[str, Any]] = {
    "plain": {"lengths": [40, 24]},
    "with-a-state": {"lengths": [40, 24], "kind": "Stateful"},
    "in-a-worker": {"lengths": [24, 40], "arguments": {"dataloader_num_workers": 1}},
    "accumulating": {"lengths": [60, 24], "arguments": {"gradient_accumulation_steps": 3}},
    "shorter-in-the-last-row": {"lengths": [40, 38]},
    "dropping-the-tail": {"lengths": [40, 38], "arguments": {"dataloader_drop_last": True}},
    "three-ranks": {"lengths": [60, 60, 30]},
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_stream_that_is_shorter_on_one_rank_ends_the_epoch_of_all_there(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    settings = TRAINED[name]
    lengths = settings["lengths"]
    first, *others = processes.results(JOBS, "train", tmp_path, settings, ranks=len(lengths))
    assert first["error"] == ""
    assert len(first["steps"]) == 8
    for other in others:
        assert len(other["steps"]) == 8
        assert other["losses"] == first["losses"]
    said = output_of(tmp_path)
    assert f"the data of rank {lengths.index(min(lengths))} ends after step" in said
    assert MUST_BE_THE_SAME in said
    assert status_in(tmp_path) == "completed"


@pytest.mark.parametrize(("kind", "length"), [("Sized", 24), ("Stateful", 27)])
def test_a_stream_that_is_the_same_on_all_ranks_is_read_to_its_end(
    processes: Processes, tmp_path: Path, kind: str, length: int
) -> None:
    settings = {"lengths": [length] * 2, "kind": kind}
    results = processes.results(JOBS, "train", tmp_path, settings)
    steps = [one + other for one, other in zip(*(result["steps"] for result in results), strict=True)]
    samples = [float(row["x"][0]) for row in ROWS[:length]]
    epoch = -(-length // 8)
    for start in range(0, 8 - epoch, epoch):
        read = [x for step in steps[start : start + epoch] for x in step]
        assert set(read) == set(samples)
        assert len(read) - length in (0, 1), "a filler at most"
    assert MUST_BE_THE_SAME not in output_of(tmp_path)


@pytest.mark.parametrize("lengths", [[40, 24], pytest.param([24, 24], marks=pytest.mark.slow)])
def test_a_killed_run_reads_on_as_the_uninterrupted_one(
    processes: Processes, tmp_path: Path, lengths: list[int]
) -> None:
    settings = {"lengths": lengths}
    whole = processes.results(JOBS, "train", tmp_path / "whole", settings)
    killed = tmp_path / "killed"
    assert processes.run(JOBS, "train", killed, {**settings, "until": 5}, ranks=2) == [3, 3], output_of(killed)
    rest = processes.results(JOBS, "train", killed, {**settings, "resume": True})
    for expected, found in zip(whole, rest, strict=True):
        assert found["steps"] == expected["steps"][3:]
        assert found["losses"][-3:] == expected["losses"][-3:]


def test_a_rank_whose_stream_is_empty_ends_the_training_of_all(processes: Processes, tmp_path: Path) -> None:
    one, other = processes.results(JOBS, "train", tmp_path, {"lengths": [40, 0]})
    assert one["error"].startswith("rank 1 cannot read: the iterable ended after 0 samples, less than one step")
    assert other["error"].startswith("the iterable ended after 0 samples, less than one step")


def test_lengths_that_differ_cannot_decide_the_number_of_steps(processes: Processes, tmp_path: Path) -> None:
    settings = {"lengths": [40, 24], "kind": "Sized", "arguments": {"max_steps": -1, "num_train_epochs": 2}}
    for result in processes.results(JOBS, "train", tmp_path, settings):
        assert result["error"].startswith("the training data has 40, 24 samples on the ranks")
        assert result["steps"] == []


@pytest.mark.parametrize(("source", "steps"), [("source", 3), ("loader", 4)])
@pytest.mark.parametrize("lengths", [[64, 12], [64, 64, 12]])
def test_the_source_of_train_that_ends_first_ends_its_epoch_on_all_ranks(
    processes: Processes, tmp_path: Path, source: str, lengths: list[int], steps: int
) -> None:
    """The loader begins another epoch, which an iterator cannot."""
    settings = {"source": source, "lengths": lengths}
    first, *others = processes.results(JOBS, "loop", tmp_path, settings, ranks=len(lengths))
    assert others == [first] * len(others)
    assert first["step"] == steps
    assert f"the data of rank {len(others)} ends after step {3 if source == 'source' else 1}" in output_of(tmp_path)


OWN = {"kind": "own stream"}
WIDE = {"overrides": {"validation.eval_global_batch_size": 8}}


@pytest.mark.parametrize(
    ("lengths", "settings"),
    [
        ([9, 5], OWN),
        ([3, 10], OWN),
        ([9, 5], {**OWN, **WIDE}),
        ([2, 9, 6], OWN),
        ([9, 5], {**OWN, "by_batch": True}),
    ],
)
def test_own_loaders_are_evaluated_until_the_longest_ends(
    processes: Processes, tmp_path: Path, lengths: list[int], settings: dict[str, Any]
) -> None:
    total = sum(lengths)
    alone = {**settings, "lengths": [total], "overrides": {}}
    (expected,) = processes.results(JOBS, "evaluate", tmp_path / "alone", alone, ranks=1)
    results = processes.results(
        JOBS, "evaluate", tmp_path / "all", {**settings, "lengths": lengths}, ranks=len(lengths)
    )
    for found in results:
        assert found.pop("eval_loss") == pytest.approx(expected["eval_loss"], rel=1e-5)
        assert found == {key: value for key, value in expected.items() if key != "eval_loss"}
        assert found.get("num_samples", total) == found.get("count", total) == found.get("eval_rows", total) == total


def test_a_run_evaluates_own_loaders_of_different_lengths(processes: Processes, tmp_path: Path) -> None:
    one, other = processes.results(JOBS, "evaluate", tmp_path, {**OWN, "lengths": [9, 5], "trains": True})
    assert len(one["losses"]) == 2
    assert one == other


@pytest.mark.parametrize(
    ("asked", "lengths"),
    [
        ({}, [12, 6]),
        ({}, [12, 11]),
        ({"only_predicts": True}, [6, 12]),
        ({"only_predicts": True}, [12, 12, 6]),
        ({"trains": True}, [12, 6]),
    ],
)
def test_a_stream_to_evaluate_that_differs_is_refused_on_all_ranks(
    processes: Processes, tmp_path: Path, asked: dict[str, Any], lengths: list[int]
) -> None:
    settings = {"kind": "stream", "lengths": lengths, **asked}
    for result in processes.results(JOBS, "evaluate", tmp_path, settings, ranks=len(lengths)):
        assert result["error"].startswith(f"the evaluation data of rank {lengths.index(min(lengths))} ends before")
        assert "must be the same on all ranks" in result["error"]
        assert str(min(lengths)) in result["error"]
    if "trains" in asked:
        assert status_in(tmp_path) == "failed"


@pytest.mark.parametrize("kind", ["list", "own list"])
def test_lists_to_evaluate_of_different_lengths_are_refused_on_all_ranks(
    processes: Processes, tmp_path: Path, kind: str
) -> None:
    for result in processes.results(JOBS, "evaluate", tmp_path, {"kind": kind, "lengths": [12, 7]}):
        assert result["error"].startswith("the evaluation data of rank 1 ends before that of other ranks")


@pytest.mark.parametrize("kind", ["stream", "list"])
def test_a_stream_to_evaluate_that_is_the_same_is_read_as_a_list_is(
    processes: Processes, tmp_path: Path, kind: str
) -> None:
    (expected,) = processes.results(JOBS, "evaluate", tmp_path / "one", {"kind": kind, "lengths": [11]}, ranks=1)
    for found in processes.results(JOBS, "evaluate", tmp_path / "two", {"kind": kind, "lengths": [11, 11]}):
        assert found.pop("eval_loss") == pytest.approx(expected["eval_loss"], rel=1e-5)
        del found["num_samples"]
        assert found == {key: value for key, value in expected.items() if key not in ("eval_loss", "num_samples")}


@pytest.mark.parametrize(
    ("lengths", "eval_iters"), [([12, 4], None), ([2, 14], 2), ([14, 2, 6], None), ([14, 2, 6], 2), ([8, 8], None)]
)
def test_iterators_are_evaluated_until_the_longest_ends(
    processes: Processes, tmp_path: Path, lengths: list[int], eval_iters: int | None
) -> None:
    settings = {"lengths": lengths, "eval_iters": eval_iters}
    top, bottom, model = 0.0, 0, TinyModel()
    read = [length if eval_iters is None else min(length, 4 * eval_iters) for length in lengths]
    for batch in (batch for length in read for batch in text_rows(length)):
        with torch.no_grad():
            top += float(model(**batch))
        bottom += int(batch["labels"].ne(-100).sum())
    for found in processes.results(JOBS, "evaluate_in_loop", tmp_path, settings, ranks=len(lengths)):
        assert found == {"loss": pytest.approx(top / bottom, rel=1e-5), "samples": sum(read)}


def test_a_rank_without_a_batch_to_evaluate_is_named_on_all(processes: Processes, tmp_path: Path) -> None:
    for result in processes.results(JOBS, "evaluate_in_loop", tmp_path, {"lengths": [12, 0, 4]}, ranks=3):
        assert result["error"].startswith("the evaluation data of rank 1 has no batch, and that of other ranks has")
        assert "by rank: [2, 0, 2]" in result["error"]


@pytest.mark.parametrize(("eval_iters", "is_refused"), [(None, True), (1, False), (2, True)])
def test_lists_are_refused_only_where_the_evaluation_reaches_their_end(
    processes: Processes, tmp_path: Path, eval_iters: int | None, is_refused: bool
) -> None:
    settings = {"lengths": [20, 12], "eval_iters": eval_iters, "loader": True}
    for result in processes.results(JOBS, "evaluate_in_loop", tmp_path, settings):
        assert ("error" in result) == is_refused, result
