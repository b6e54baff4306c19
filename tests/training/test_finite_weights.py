"""Weights that an update has made infinite or NaN are neither saved nor passed off as trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep import Trainer, TrainingArguments
from onstep.config import ConfigContainer
from onstep.errors import NonFiniteError
from onstep.training import pretrain
from tests.support.forked_processes import Processes
from tests.support.small_runs import run, small_state

OVERFLOWN = r"the weights are NaN or infinite after step {}: .*Lower {}"


@pytest.fixture
def config(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.optimizer.lr, tiny_config.scheduler.lr_warmup_iters = 1e38, 0
    tiny_config.validation.eval_iters = 0
    tiny_config.run.output_dir, tiny_config.run.name = str(tmp_path), "high"
    return tiny_config


@pytest.mark.parametrize(("steps", "save_interval"), [(1, None), (3, 1)], ids=["the last step", "a saved step"])
def test_a_run_whose_update_overflows_fails_and_saves_nothing_of_it(
    config: ConfigContainer, steps: int, save_interval: int | None
) -> None:
    config.train.train_iters, config.checkpoint.save_interval = steps, save_interval
    with pytest.raises(NonFiniteError, match=OVERFLOWN.format(1, "optimizer.lr")):
        pretrain(config)
    assert not list(Path(config.run.output_dir).rglob("*.safetensors"))


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": (self.layer(x).squeeze(-1) - labels).abs().mean()}


def test_a_trainer_says_so_in_its_own_words(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=1, learning_rate=1e39, optim="sgd", use_cpu=True)
    rows = [{"x": torch.ones(2), "labels": 1.0}] * 8
    with pytest.raises(NonFiniteError, match=OVERFLOWN.format(1, "learning_rate")):
        Trainer(Line(), arguments, train_dataset=rows).train()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_frozen_weights_may_be_infinite() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)

    def step(data_iterator: Any, model: Any) -> Any:
        return model(torch.ones(3, 2)).mean(), lambda loss: loss

    run(small_state(train_iters=2), step=step, model=Masked())


@pytest.mark.distributed
def test_all_ranks_fail_if_the_weights_of_one_have_overflowed(processes: Processes, tmp_path: Path) -> None:
    for rank, error in enumerate(processes.results("tests.support.jobs.anomaly_jobs", "overflow", tmp_path, ranks=2)):
        assert "the weights are NaN or infinite after step 3" in error
        assert ("parts of them on other ranks" in error) == (rank == 0)
