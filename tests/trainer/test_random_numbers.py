"""Random numbers are drawn where `transformers.Trainer` draws them, so that dropout has the same masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.support.small_models import arguments, quiet, regression_rows

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "num_train_epochs": 3,
    "learning_rate": 0.05,
    "logging_steps": 1,
    "train_sampling_strategy": "sequential",
    "seed": 5,
    "use_cpu": True,
}


class Dropping(nn.Module):
    """A layer behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x).view(-1), labels.view(-1))}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def theirs(directory: Path, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        str(directory / "theirs"), report_to="none", save_strategy="no", disable_tqdm=True, **OPTIONS, **options
    )
    trainer = transformers.Trainer(Dropping(), args, train_dataset=regression_rows(8), eval_dataset=regression_rows(4))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def ours(directory: Path, **options: Any) -> Any:
    return quiet(
        Dropping(), arguments(directory, **{**OPTIONS, **options}), regression_rows(8), eval_dataset=regression_rows(4)
    )


@pytest.mark.parametrize("evaluated", ["no", "epoch"])
def test_dropout_has_the_masks_of_transformers(tmp_path: Path, evaluated: str) -> None:
    """Over several epochs, also where evaluations lie between them, and where the script has drawn before."""
    expected = theirs(tmp_path, eval_strategy=evaluated)
    torch.rand(3)
    known = losses(expected)
    found = ours(tmp_path, eval_strategy=evaluated)
    torch.rand(3)
    assert losses(found) == pytest.approx(known, rel=1e-6)
    assert len(set(known)) == len(known)


def test_a_requested_evaluation_does_not_change_the_training(tmp_path: Path) -> None:
    """A run that is killed afterwards repeats its steps without it."""

    class Asks(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
            control.should_evaluate = state.global_step == 2
            return control

    expected = losses(ours(tmp_path / "one"))
    asked = ours(tmp_path / "two")
    asked.add_callback(Asks())
    assert losses(asked) == expected
    assert any("eval_loss" in record for record in asked.state.log_history)


def test_a_second_training_begins_with_the_numbers_of_the_first(tmp_path: Path) -> None:
    trainer = ours(tmp_path, learning_rate=0.0)
    first = losses(trainer)
    assert losses(trainer) == first
