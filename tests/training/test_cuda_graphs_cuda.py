"""What only a GPU can show: runs with CUDA graphs log the losses of a run without, and train the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import pretrain
from onstep.config import ConfigContainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def losses_of(config: ConfigContainer, directory: Path, mode: str | None) -> list[dict[str, Any]]:
    config.run.name, config.run.output_dir = str(mode), str(directory)
    config.train.torch_compile, config.train.torch_compile_mode = True, mode
    config.train.train_iters, config.train.global_batch_size = 12, 4
    config.logger.log_interval, config.validation.eval_interval, config.dist.device = 3, 6, "cuda"
    torch._dynamo.reset()
    state = pretrain(config)
    found = [{key: one[key] for key in one if "loss" in key} for one in state.info.log_history]
    assert sum(map(len, found)) > 4
    return found


@pytest.mark.parametrize("micro", [4, 2, 1])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_do_not_change_what_is_logged(
    tiny_config: ConfigContainer, tmp_path: Path, mode: str, micro: int
) -> None:
    tiny_config.train.micro_batch_size = micro
    plain = losses_of(tiny_config, tmp_path, None)
    graphs = losses_of(tiny_config, tmp_path, mode)
    assert [set(one) for one in graphs] == [set(one) for one in plain]
    for one, other in zip(graphs, plain, strict=True):
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-3), (key, one, other)
