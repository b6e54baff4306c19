"""With NCCL: tensors on the CPU are reduced too, and a failing rank ends without waiting for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onstep.config import DistributedInitConfig
from onstep.distributed import open_world
from tests.support import torchrun

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA GPU and NCCL"
)


def test_a_group_of_one_has_backends_for_both_devices() -> None:
    world = open_world(DistributedInitConfig(device="cuda", distributed_backend="nccl"))
    try:
        for device in (world.device, torch.device("cpu")):
            tensor = torch.ones(3, device=device)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1.0, 1.0, 1.0]
        dist.barrier()
    finally:
        world.close()
    assert not dist.is_initialized()


def test_a_group_is_aborted_after_an_error() -> None:
    world = open_world(DistributedInitConfig(device="cuda", distributed_backend="nccl"))
    dist.all_reduce(torch.ones(3, device=world.device))
    with pytest.raises(ValueError, match="of the test"):  # noqa: PT012 - closed while the error is handled
        try:
            raise ValueError("of the test")
        finally:
            world.close()
    assert not dist.is_initialized()


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("door", ["pretrain", "trainer"])
def test_a_failing_rank_shows_its_traceback_and_ends(
    door: str, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    settings = {"door": door, "corpus": str(corpus), "cache": str(token_cache), "device": "cuda"}
    words = torchrun.job("tests.support.jobs.group_end_jobs", "fails", settings)
    code, said = torchrun.finish(words, tmp_path)
    assert code == 1
    assert "ValueError: of the test" in said
