"""`num_items_in_batch` of a regression: the labels of the whole step, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from onstep import Trainer
from tests.support.small_models import Regression, arguments, losses_of, regression_rows

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "learning_rate": 0.1,
    "logging_steps": 1,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def divided(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return (outputs["logits"] - labels).square().sum() / num_items_in_batch


def divided_if_given(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    squares = (outputs["logits"] - labels).square()
    return squares.mean() if num_items_in_batch is None else squares.sum() / num_items_in_batch


class Steps(Trainer):
    """A Trainer whose micro-batches go through Hugging Face's methods."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, inputs, num_items_in_batch)


class Inputs(Trainer):
    """Likewise, with the loop's own backward pass."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)


class Overridden(Trainer):
    """Computes the loss in a method."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = divided_if_given(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def expected(tmp_path: Path, function: Any, seen: list[float]) -> list[float]:
    args = transformers.TrainingArguments(str(tmp_path / "theirs"), report_to="none", **OPTIONS)
    theirs = transformers.Trainer(
        Regression(), args, train_dataset=regression_rows(11), compute_loss_func=noting(function, seen)
    )
    theirs.train()
    return [record["loss"] for record in theirs.state.log_history if "loss" in record]


def noting(function: Any, seen: list[float]) -> Any:
    def noted(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append(float(num_items_in_batch))
        return function(outputs, labels, num_items_in_batch)

    return noted


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("function", [divided, divided_if_given])
@pytest.mark.parametrize("kind", [Trainer, Steps, Inputs])
def test_the_number_and_the_losses_are_those_of_transformers(tmp_path: Path, kind: Any, function: Any) -> None:
    """The last step of an epoch has fewer samples: 11 are 2 steps of 4 and one of 3."""
    their_items: list[float] = []
    their_losses = expected(tmp_path, function, their_items)
    items: list[float] = []
    ours = kind(
        Regression(),
        arguments(tmp_path, **OPTIONS),
        train_dataset=regression_rows(11),
        compute_loss_func=noting(function, items),
    )
    ours.train()
    assert items == their_items
    assert set(items) == {4.0, 3.0}
    assert losses_of(ours) == pytest.approx(their_losses, rel=1e-5)


def test_an_overridden_compute_loss_gets_the_number_too(tmp_path: Path) -> None:
    their_losses = expected(tmp_path, divided_if_given, [])
    ours = Overridden(
        Regression(),
        arguments(tmp_path, **OPTIONS),
        train_dataset=regression_rows(11),
        eval_dataset=regression_rows(7),
    )
    ours.train()
    assert losses_of(ours) == pytest.approx(their_losses, rel=1e-5)
    plain = Trainer(ours.model, arguments(tmp_path, **OPTIONS), eval_dataset=regression_rows(7))
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
