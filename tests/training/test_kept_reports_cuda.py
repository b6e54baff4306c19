"""What only a GPU can show: its memory does not grow with reports that still have their graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def reporting_step(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    tokens, labels = batch["tokens"], batch["labels"]
    sharpness = model(tokens).softmax(-1).square().sum(-1).mean()
    return model(tokens, labels, reduction="sum"), lambda loss: (
        loss,
        labels.ne(-100).sum(),
        {"sharpness": sharpness, "first": sharpness[None].expand(1 << 22).contiguous()[0]},
    )


def test_the_memory_of_a_run_is_the_same_after_every_step(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    allocated: list[int] = []
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: allocated.append(torch.cuda.memory_allocated()))
    tiny_config.run.output_dir, tiny_config.run.name = str(tmp_path), "run"
    tiny_config.train.train_iters, tiny_config.validation.eval_interval = 24, None
    tiny_config.logger.log_interval, tiny_config.dist.device = 100, "cuda"
    pretrain(tiny_config, reporting_step, callbacks=manager)
    assert max(allocated[4:]) - min(allocated[4:]) < 1 << 20, allocated
