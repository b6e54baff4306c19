"""Two real ranks: growing batches give the losses of one, and a weight that differs on one rank is found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.rampup_jobs"
GROWING = [
    "train.rampup_batch_size=[4,4,40]",
    "train.global_batch_size=16",
    "train.train_iters=8",
    "model.hidden_dropout=0",
    "model.attention_dropout=0",
]


@pytest.fixture(scope="module")
def ranks(processes: Processes, corpus: Path, token_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    directory = tmp_path_factory.mktemp("ranks")
    return Ranks(processes, directory, JOBS, corpus=str(corpus), cache=str(token_cache))


def results(ranks: Ranks, name: str, number: int) -> list[dict[str, Any]]:
    return [json.loads((ranks.directory / name / f"result-{rank}.json").read_text()) for rank in range(number)]


def test_a_growing_batch_has_the_same_losses_on_two_ranks(ranks: Ranks) -> None:
    assert ranks.start("one", "grow", ranks=1, words=GROWING) == [0], ranks.output("one")
    assert ranks.start("two", "grow", words=GROWING) == [0, 0], ranks.output("two")
    [one], two = results(ranks, "one", 1), results(ranks, "two", 2)
    assert [size for _, size in one["sizes"]] == [4, 4, 4, 4, 8, 8, 12, 16]
    for rank in two:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert rank["sizes"] == [[size // 4, size] for _, size in one["sizes"]]
        assert rank["counts"] == one["counts"]


def test_two_ranks_killed_within_the_ramp_end_with_the_same_weights(ranks: Ranks) -> None:
    words = [*GROWING, "model.hidden_dropout=0.1", "checkpoint.save_interval=2", "train.iterations_to_skip=[6]"]
    assert ranks.start("whole", "grow", words=words) == [0, 0], ranks.output("whole")
    for step in (5, 7):
        assert ranks.start("killed", "grow", words=words, dies_after=step) == [9, 9], ranks.output("killed")
    assert ranks.start("killed", "grow", words=words) == [0, 0], ranks.output("killed")
    whole, killed = results(ranks, "whole", 2), results(ranks, "killed", 2)
    assert whole[0]["weights"] == killed[0]["weights"]
    assert whole[0]["counts"] == killed[0]["counts"]
    assert whole[1]["losses"][-len(killed[1]["losses"]) :] == killed[1]["losses"]


def test_a_weight_that_one_rank_changes_is_found_on_all_and_named(ranks: Ranks) -> None:
    words = ["train.check_weight_hash_across_dp_replicas_interval=2"]
    assert ranks.start("tampered", "tamper", words=words) == [0, 0], ranks.output("tampered")
    for result in results(ranks, "tampered", 2):
        assert "Parameter hashes not matching across DP replicas after 4 iterations" in result["error"]
        assert "rank 1 differs in" in result["error"]
        assert "rank 0" not in result["error"]
        assert "final_norm.weight" in result["error"]
        assert result["reason"] == ["failed"]
    assert ">>> Weight hashes match after 2 iterations..." in ranks.output("tampered")


def test_equal_ranks_match_to_the_end(ranks: Ranks) -> None:
    words = ["train.check_weight_hash_across_dp_replicas_interval=5", "train.train_iters=5"]
    assert ranks.start("equal", "grow", words=words) == [0, 0], ranks.output("equal")
    calls = [line for line in ranks.output("equal").splitlines() if line.startswith(">>>")]
    assert calls == [f">>> Weight hashes match after {step} iterations..." for step in (0, 5)]
