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
            r"parallel.data_parallel_replicate_size\S*=2 must be the number of ranks, .* 3 ranks",
        ),
        (
            {"data_parallel_shard_size": 2},
            3,
            r"parallel.data_parallel_shard_size\S*=2 does not divide the 3 ranks of this run",
        ),
        ({"context_parallel_size": 2}, 2, r"parallel.context_parallel_size\S*=2 must be 1: "),
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
        if "context" in said:  # a state made by hand, whose world is this process alone
            assert re.search(said, found["through_train"][0])


REFUSED = {
    "configured class": r"^fsdp\.wrap names 'Layr', a class of no module in Transformer\. Did you mean 'Layer'",
    "no blocks": r"^Undivided has no blocks .* set fsdp_config\['transformer_layer_cls_to_wrap'\] to .* Block",
    "class": r"^fsdp_config\['transformer_layer_cls_to_wrap'\] names 'Blok', .* Did you mean 'Block'",
    "shared": r"^layers\.0\.inner\.weight and layers\.1\.inner\.weight are one .* or give each weights of its",
    "float16": r"^float16 mixed precision requires float32 weights, got .*float16.*; load .* float32 .* bfloat16$",
    "quantized": r"^layers\.0\.packed is a quantized parameter \(Parameter of torch\.uint8\), .* in bfloat16, or",
    "scalar": r"^layers\.0\.scale has no dimension, so it cannot be divided .* make it a vector",
    "LBFGS": r"^LBFGS requires a closure, .*; use AdamW or SGD$",
    "closure": r"^Closing requires a closure, .*; use AdamW or SGD$",
    "whole": r"^the SGD in optimizers has the whole parameters of Undivided, .* pass a factory, .*create_optimizer",
}


def test_what_cannot_be_divided_is_refused_in_one_line_on_all_ranks_before_any_group_is_made(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    settings = {"reasons": [*REFUSED.keys() - {"configured class"}], "corpus": str(corpus), "cache": str(token_cache)}
    for found in processes.results(JOBS, "undivided", tmp_path, settings):
        assert set(found) == set(REFUSED)
        for reason, (error, has_group) in found.items():
            assert re.search(REFUSED[reason], error), (reason, error)
            assert "\n" not in error
            assert not has_group, reason


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
