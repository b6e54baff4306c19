"""Ranks that divide a model have the same samples: a run counts, weighs and logs them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes

JOBS = "tests.support.jobs.world_jobs"
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("data_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_is_the_one_of_its_data_ranks_alone(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path, data_ranks: int
) -> None:
    settings: dict[str, Any] = {"corpus": str(corpus), "cache": str(token_cache), "folder": str(tmp_path)}
    alone = processes.results(
        JOBS, "pretrain", tmp_path / "alone", {**settings, "name": "a", "tp": 1}, ranks=data_ranks
    )
    divided = processes.results(
        JOBS, "pretrain", tmp_path / "divided", {**settings, "name": "b", "tp": 2}, ranks=2 * data_ranks
    )
    assert len(alone[0]["losses"]) == 6
    assert [one["world_size"] for one in alone[0]["saved"]] == [data_ranks] * len(alone[0]["saved"])
    assert (len(alone[0]["logs"]), len(alone[0]["evaluations"])) == (4, 3)
    assert [divided[2 * rank] for rank in range(data_ranks)] == alone
    assert [divided[2 * rank + 1] for rank in range(data_ranks)] == alone


@pytest.mark.parametrize("data_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trainer_gives_the_numbers_of_its_data_ranks_alone(
    processes: Processes, tmp_path: Path, data_ranks: int
) -> None:
    alone = processes.results(JOBS, "trainers", tmp_path / "alone", {"tp": 1}, ranks=data_ranks)
    divided = processes.results(JOBS, "trainers", tmp_path / "divided", {"tp": 2}, ranks=2 * data_ranks)
    assert [len(one["losses"]) for one in alone[0]] == [{1: 11, 2: 6}[data_ranks]] * 3
    assert [divided[2 * rank] for rank in range(data_ranks)] == alone
    assert [divided[2 * rank + 1] for rank in range(data_ranks)] == alone


def test_iterators_by_hand_count_once_for_ranks_with_the_same_samples(processes: Processes, tmp_path: Path) -> None:
    settings = {"data_ranks": 2, "tp": 1}
    alone = processes.results(JOBS, "by_hand", tmp_path / "alone", settings, ranks=2)
    divided = processes.results(JOBS, "by_hand", tmp_path / "divided", {**settings, "tp": 2}, ranks=4)
    assert [one["seen"] for one in alone] == [[32, 14]] * 2
    assert divided == [alone[0], alone[0], alone[1], alone[1]]
