"""Ranks that start together find each other in a store that outlives them, and are refused if they differ."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from onstep.distributed.meeting import meet
from onstep.errors import ConfigError
from tests.support.forked_processes import Processes

JOBS = "tests.support.jobs.meeting_jobs"
LONG, SHORT = timedelta(minutes=1), timedelta(milliseconds=100)


def all_of(*ranks: Callable[[], str]) -> list[str]:
    """The name that each rank gets, or the text of its refusal; each in a thread of its own."""

    def outcome(rank: Callable[[], str]) -> str:
        try:
            return rank()
        except ConfigError as refusal:
            return str(refusal)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(outcome, ranks))


def test_each_attempt_in_one_store_has_a_name_of_its_own() -> None:
    store, names = HashStore(), []
    for size in (3, 2, 3, 1):
        met = all_of(*(partial(meet, store, rank, size, LONG) for rank in range(size)))
        assert len(set(met)) == 1
        names.append(met[0])
    assert len(set(names)) == 4


def test_what_the_ranks_of_an_attempt_that_never_met_have_written_is_not_believed() -> None:
    store = HashStore()
    [refusal] = all_of(partial(meet, store, 1, 3, SHORT))
    assert "rank 1 has not met rank 2 of 3 within dist.distributed_timeout_minutes=" in refusal
    all_of(partial(meet, store, 2, 3, SHORT))
    [refusal] = all_of(partial(meet, store, 0, 3, SHORT))
    assert "rank 0 has not met ranks 1, 2 of 3" in refusal
    assert len(set(all_of(*(partial(meet, store, rank, 3, LONG) for rank in range(3))))) == 1


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_differ_are_all_refused_with_one_line(size: int) -> None:
    facts = {"train.train_iters": "8", "the version of torch": "2.13.0", "the code of mine": "1234"}
    other = {"train.train_iters": "9", "the version of torch": "2.13.0"}
    store = HashStore()
    said = all_of(*(partial(meet, store, rank, size, LONG, other if rank == 1 else facts) for rank in range(size)))
    assert len(set(said)) == 1, said
    assert said[0].startswith("rank 1 differs from rank 0: train.train_iters is 9, on rank 0 8. All ranks must have")


def test_a_rank_started_for_another_number_of_ranks_is_refused() -> None:
    store = HashStore()
    said = all_of(partial(meet, store, 0, 2, LONG), partial(meet, store, 1, 3, LONG))
    assert said[0] == said[1]
    assert "rank 1 differs from rank 0: $WORLD_SIZE is 3, on rank 0 2" in said[0]


@pytest.mark.distributed
def test_ranks_with_different_configurations_are_refused_at_both_doors(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    settings = {"corpus": str(corpus), "cache": str(token_cache), "runs": str(tmp_path / "runs")}
    said = processes.results(JOBS, "differ", tmp_path, settings)
    assert said[0] == said[1]
    for door, name in (("pretrain", "checkpoint.save_interval"), ("trainer", "save_steps")):
        assert f"rank 1 differs from rank 0: {name} is 3, on rank 0 2." in said[0][door]
    assert said[0]["group"] == "False", "they are refused before there is a group"
    assert not (tmp_path / "runs").exists()


@pytest.mark.distributed
def test_a_node_that_has_counted_fewer_restarts_is_met(processes: Processes, tmp_path: Path) -> None:
    assert processes.results(JOBS, "restarted", tmp_path) == [2.0, 2.0]


@pytest.mark.distributed
def test_a_directory_that_a_rank_does_not_see_is_refused(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    said = processes.results(JOBS, "elsewhere", tmp_path, {"corpus": str(corpus), "cache": str(token_cache)})
    assert said[0] == said[1]
    assert said[0].startswith(f"rank 1 does not see {tmp_path}/of-1/runs/a/run.json, which rank 0 has written to ")
