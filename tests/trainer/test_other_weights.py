"""Weights that are trained with the model and are not its own, such as those of a loss, are part of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep import Trainer
from onstep.errors import CheckpointError
from tests.support.small_models import Regression, arguments, regression_rows


class Scaled(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((size,), 2.0))

    def forward(self, output: Tensor) -> Tensor:
        return ((output * self.scale - 1) ** 2).mean()


class Mine(Trainer):
    """Trains the weight of the loss with those of the model."""

    own_loss: Scaled

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        assert self.model is not None
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.own_loss.parameters()], lr=0.05)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        return self.own_loss(model(**{key: value for key, value in inputs.items() if key != "labels"})["logits"])


def trained(directory: Path, steps: int, size: int = 1, **options: Any) -> Mine:
    args = arguments(directory, max_steps=steps, save_steps=2, lr_scheduler_type="constant", **options)
    trainer = Mine(Regression(), args, train_dataset=regression_rows(16), default_callbacks=False)
    trainer.own_loss = Scaled(size)
    trainer.train()
    return trainer


def test_a_run_that_is_continued_ends_with_the_weight_of_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 4)
    trained(tmp_path / "cut", 2)
    continued = trained(tmp_path / "cut", 4, resume_from_checkpoint=True)
    assert continued.global_state is not None
    assert continued.global_state.is_resumed
    assert torch.equal(continued.own_loss.scale, whole.own_loss.scale)
    assert not torch.equal(whole.own_loss.scale, Scaled().scale)
    for mine, theirs in zip(continued.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Scaling(Regression):
    """Scales its output by a weight that is not among its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Parameter(torch.full((), 2.0))]

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = super().forward(x)["logits"] * self.others[0]
        return {"logits": logits} if labels is None else {"loss": (logits - labels).square().mean(), "logits": logits}


def test_the_weights_of_an_optimizer_that_is_passed_are_those_of_the_uninterrupted_run(tmp_path: Path) -> None:
    def weight(directory: Path, steps: int, **options: Any) -> Tensor:
        model = Scaling()
        optimizer = torch.optim.AdamW([*model.parameters(), *model.others], lr=0.05)
        args = arguments(directory, max_steps=steps, save_steps=2, lr_scheduler_type="constant", **options)
        Trainer(
            model, args, train_dataset=regression_rows(16), optimizers=(optimizer, None), default_callbacks=False
        ).train()
        return model.others[0]

    whole = weight(tmp_path / "whole", 4)
    weight(tmp_path / "cut", 2)
    assert torch.equal(weight(tmp_path / "cut", 4, resume_from_checkpoint=True), whole)
    assert whole != 2.0


def test_a_loss_with_other_weights_is_refused_when_the_run_is_continued(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    with pytest.raises(CheckpointError, match="shape"):
        trained(tmp_path, 4, size=3, resume_from_checkpoint=True)
