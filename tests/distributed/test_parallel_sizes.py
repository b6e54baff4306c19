"""Real gloo processes: parallel sizes reach a run's world, and wrong ones are refused before there is any group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed
JOBS = "tests.support.jobs.parallel_jobs"


@pytest.mark.parametrize(
    ("parallel", "ranks", "said"),
    [
        (
            {"data_parallel_replicate_size": 2},
            3,
            r"parallel: 2 \(replicate\) must be the number of ranks, .* 3 ranks",
        ),
        ({"data_parallel_shard_size": 2}, 3, r"parallel: 2 \(shard\) does not divide the 3 ranks of this run"),
        ({"tensor_model_parallel_size": 2}, 2, r"parallel.tensor_model_parallel_size\S*=2 must be 1: tensor"),
    ],
)
def test_sizes_that_cannot_be_are_refused_on_all_ranks_before_any_group_is_made(
    processes: Processes,
    corpus: Path,
    token_cache: Path,
    tmp_path: Path,
    parallel: dict[str, int],
    ranks: int,
    said: str,
) -> None:
    settings = {"corpus": str(corpus), "cache": str(token_cache), "parallel": parallel, "ways": 3}
    for found in processes.results(JOBS, "sizes", tmp_path, settings, ranks=ranks):
        for way in ("through_pretrain", "through_trainer"):
            error, has_group = found[way]
            assert re.search(said, error), (way, error)
            assert not has_group, way
        if "tensor" in said:  # a state made by hand, whose world is this process alone
            assert re.search(said, found["through_train"][0])


def test_the_sizes_of_a_configuration_are_those_of_the_world(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    settings = {
        "corpus": str(corpus),
        "cache": str(token_cache),
        "parallel": {"data_parallel_replicate_size": 2},
        "ways": 2,
    }
    for found in processes.results(JOBS, "sizes", tmp_path, settings):
        assert found["through_pretrain"] == found["through_trainer"] == [2, 1, 2]
