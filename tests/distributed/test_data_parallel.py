"""The order in which gradients are summed over ranks is a property of the model, not of what a process has done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep.config import DistributedDataParallelConfig
from onstep.distributed import World, data_parallel
from onstep.errors import ConfigError
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "settings",
    [
        {"ddp": {}},
        {"ddp": {"bucket_cap_mb": 0.03}},
        {"ddp": {"static_graph": True, "bucket_cap_mb": 0.03}},
        {"ddp": {"static_graph": True, "find_unused_parameters": True}},
        {"ddp": {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.03}, "sparse": True},
        {"ddp": {"bucket_cap_mb": 0.03}, "frozen": True},
    ],
    ids=str,
)
def test_a_new_wrapper_sums_as_one_that_has_taken_steps(
    processes: Processes, tmp_path: Path, settings: dict[str, Any]
) -> None:
    results = processes.results("tests.support.jobs.rank_jobs", "buckets", tmp_path, settings, ranks=3)
    assert results == [{"same": True, "unwrapped": True}] * 3


def test_gradients_are_exchanged_in_bfloat16_if_asked_for(
    processes: Processes, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    paths = {"corpus": str(corpus), "cache": str(token_cache)}
    exact, rounded = (
        processes.results("tests.support.jobs.rank_jobs", "reduced", tmp_path / str(is_on), paths | {"in_bf16": is_on})
        for is_on in (False, True)
    )

    for ranks, is_rounded in ((exact, False), (rounded, True)):
        assert [rank["is_rounded"] for rank in ranks] == [is_rounded] * 2
        assert ranks[0]["weights"] == ranks[1]["weights"]
    for door in ("pretrain", "trainer"):
        assert rounded[0]["weights"][door] != exact[0]["weights"][door]
        assert rounded[0]["losses"][door] == pytest.approx(exact[0]["losses"][door], rel=2e-2)


def test_sparse_gradients_cannot_be_exchanged_in_bfloat16() -> None:
    world = World(rank=0, size=2, device=torch.device("cpu"))
    chunks = [nn.Sequential(nn.Embedding(3, 2, sparse=True))]
    with pytest.raises(ConfigError, match=r"grad_reduce_in_bf16=true .* 0 is an embedding whose gradients are sparse"):
        data_parallel(chunks, world, DistributedDataParallelConfig(grad_reduce_in_bf16=True))
