"""Loss and gradients of a step do not depend on how it is split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onstep import CallbackManager, Trainer
from onstep.config import ConfigContainer, resolve
from onstep.data import TrainLoader
from onstep.optim import build_optimizer, build_scheduler
from onstep.training import GlobalState, train
from tests.support.small_models import (
    IGNORE,
    CountingTokenModel,
    LogitsModel,
    NextTokenForCausalLM,
    Regression,
    TokenModel,
    arguments,
    ragged_rows,
    regression_rows,
)

SPLITS = [(24, 1), (12, 2), (8, 3), (1, 24), (5, 5)]
"""Samples of a micro-batch, and micro-batches of a step; the last one has four of its micro-batches full."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # float32: sums of other orders, a few units of 1e-7 each

Steps = list[tuple[Tensor, list[Tensor]]]


def total_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


class IgnoringTrainer(Trainer):
    """Overrides compute_loss as many do: the parameter is there, and the loss is a mean."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        return (loss, outputs) if return_outputs else loss


class OldTrainer(Trainer):
    """The same without the parameter, as it was written for earlier transformers."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = model(inputs["input_ids"])
        loss = cross_entropy(outputs["logits"].flatten(0, 1), inputs["labels"].flatten(), ignore_index=IGNORE)
        return (loss, outputs) if return_outputs else loss


class SharingTrainer(Trainer):
    """Overrides compute_loss and divides by num_items_in_batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["input_ids"])
        loss = total_loss(outputs["logits"], inputs["labels"]) / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class HandingOnTrainer(Trainer):
    """Overrides compute_loss and hands everything to the base class, whatever the model makes of it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)


class KeywordsTrainer(Trainer):
    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().compute_loss(model, inputs, **kwargs)


def share_of_outputs(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return total_loss(outputs["logits"], labels) / num_items_in_batch


def mean_of_outputs(outputs: Any, labels: Tensor) -> Tensor:
    return cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


CASES: dict[str, tuple[type[Trainer], type[TokenModel], dict[str, Any]]] = {
    "a model that takes num_items_in_batch": (Trainer, CountingTokenModel, {}),
    "a model that gives a mean": (Trainer, TokenModel, {}),
    "a compute_loss_func with num_items_in_batch": (Trainer, LogitsModel, {"compute_loss_func": share_of_outputs}),
    "a compute_loss_func that gives a mean": (Trainer, LogitsModel, {"compute_loss_func": mean_of_outputs}),
    "a compute_loss that ignores num_items_in_batch": (IgnoringTrainer, LogitsModel, {}),
    "a compute_loss without num_items_in_batch": (OldTrainer, LogitsModel, {}),
    "a compute_loss that uses num_items_in_batch": (SharingTrainer, LogitsModel, {}),
    "a compute_loss that hands on to a mean": (HandingOnTrainer, TokenModel, {}),
    "a compute_loss that hands on to a share": (HandingOnTrainer, CountingTokenModel, {}),
    "a compute_loss that hands on all keywords to a mean": (KeywordsTrainer, TokenModel, {}),
    "a compute_loss that hands on all keywords to a share": (KeywordsTrainer, CountingTokenModel, {}),
}


def noting_steps(steps: Steps) -> CallbackManager:
    """Notes the loss and the gradients of each step."""
    manager, gradients = CallbackManager(), []

    def note_gradients(context: Any) -> None:
        gradients.append([p.grad.clone() for p in context.unwrapped_model.parameters()])

    manager.register("on_pre_optimizer_step", note_gradients)
    manager.register("on_train_step_end", lambda c: steps.append((c.loss_dict["lm loss"].clone(), gradients[-1])))
    return manager


def steps_of(
    cls: type[Trainer], model: nn.Module, rows: Any, directory: Path, micro: int, accumulation: int, **options: Any
) -> Steps:
    steps: Steps = []
    args = arguments(
        directory / f"{micro}",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0,
        optim="sgd",
        learning_rate=0.1,
    )
    callbacks = noting_steps(steps)
    cls(model, args, train_dataset=rows, callbacks=callbacks, default_callbacks=False, **options).train()
    return steps


def by_hand(model: TokenModel, rows: list[dict[str, Tensor]], loss_of: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Mean over all labels of one big batch, and its gradients."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    loss = loss_of(model.logits(batch["input_ids"]), batch["labels"])
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return total_loss(logits, labels) / labels.ne(IGNORE).sum()


def shifted_mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return mean_loss(logits[:, :-1], labels[:, 1:])


def check_equal(found: Any, expected: Any, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float64) for case in CASES),
        ("a model that takes num_items_in_batch", torch.float32),
        ("a model that gives a mean", torch.float32),
        *(pytest.param(case, torch.float32, marks=pytest.mark.slow) for case in list(CASES)[2:]),
    ],
)
def test_every_split_gives_the_loss_and_gradients_of_one_big_batch(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    cls, model_class, options = CASES[case]
    rows = ragged_rows(24)
    expected = by_hand(TokenModel(dtype=dtype), rows, mean_loss)
    for micro, accumulation in SPLITS:
        (step,) = steps_of(cls, model_class(dtype=dtype), rows, tmp_path, micro, accumulation, **options)
        check_equal(step, expected, dtype)


def test_a_causal_model_that_gives_a_mean_is_weighted_by_its_shifted_labels(tmp_path: Path) -> None:
    rows = ragged_rows(24, shared=1)
    expected = by_hand(TokenModel(dtype=torch.float64), rows, shifted_mean_loss)
    for micro, accumulation in SPLITS:
        model = NextTokenForCausalLM(dtype=torch.float64)
        (step,) = steps_of(Trainer, model, rows, tmp_path, micro, accumulation)
        check_equal(step, expected, torch.float64)


def test_a_mean_without_labels_to_count_is_weighted_by_samples(tmp_path: Path) -> None:
    rows = [{key: value.double() for key, value in row.items()} for row in regression_rows(24)]
    whole = steps_of(Trainer, Regression().double(), rows, tmp_path / "whole", 24, 1)
    for micro, accumulation in SPLITS:
        (step,) = steps_of(Trainer, Regression().double(), rows, tmp_path, micro, accumulation)
        check_equal(step, whole[0], torch.float64)


def test_class_labels_that_are_ignored_do_not_count(tmp_path: Path) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(3, 4, dtype=torch.float64)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": cross_entropy(self.layer(x), labels, ignore_index=IGNORE)}

    rows = [{"x": row["x"].double(), "label": IGNORE if n % 5 else n % 4} for n, row in enumerate(regression_rows(24))]
    whole = steps_of(Trainer, Classifier(), rows, tmp_path / "whole", 24, 1)
    for micro, accumulation in SPLITS:
        (step,) = steps_of(Trainer, Classifier(), rows, tmp_path, micro, accumulation)
        check_equal(step, whole[0], torch.float64)


@pytest.mark.parametrize("model_class", [TokenModel, CountingTokenModel])
def test_the_shorter_step_at_the_end_of_an_epoch_is_split_as_well(model_class: type, tmp_path: Path) -> None:
    rows = ragged_rows(31)
    whole = steps_of(Trainer, model_class(dtype=torch.float64), rows, tmp_path / "whole", 24, 1)
    split = steps_of(Trainer, model_class(dtype=torch.float64), rows, tmp_path, 4, 6)
    assert len(whole) == len(split) == 2
    for one, other in zip(split, whole, strict=True):
        check_equal(one, other, torch.float64)


def test_a_forward_step_that_returns_sum_and_count_is_exact(tmp_path: Path) -> None:
    rows = ragged_rows(24)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        total = total_loss(model.logits(batch["input_ids"]), batch["labels"])
        return total, lambda value: (value, batch["labels"].ne(IGNORE).sum(), {})

    for dtype in TOLERANCE:
        expected = by_hand(TokenModel(dtype=dtype), rows, mean_loss)
        for micro, accumulation in SPLITS[:-1]:
            check_equal(
                _trained_directly(forward_step, TokenModel(dtype=dtype), rows, micro, accumulation), expected, dtype
            )


def _trained_directly(forward_step: Any, model: nn.Module, rows: Any, micro: int, accumulation: int) -> Any:
    config = ConfigContainer()
    config.train.micro_batch_size, config.train.global_batch_size = micro, micro * accumulation
    config.train.train_iters, config.optimizer.lr, config.optimizer.clip_grad = 1, 0.1, None
    config = resolve(config)
    optimizer = build_optimizer([model], config.optimizer)
    scheduler = build_scheduler(
        optimizer, config.scheduler, config.optimizer, train_iters=1, global_batch_size=micro * accumulation
    )
    steps: Steps = []
    loader = TrainLoader(rows, micro_batch_size=micro, global_batch_size=micro * accumulation, shuffle=False)
    state = GlobalState(cfg=config, num_microbatches=accumulation)
    train(forward_step, [model], optimizer, scheduler, loader, None, state, callback_manager=noting_steps(steps))
    return steps[0]


@pytest.mark.parametrize("model_class", [TokenModel, CountingTokenModel])
def test_the_weighting_is_a_setting(model_class: type, tmp_path: Path) -> None:
    """By micro-batches each mean counts the same; the plain average of four means is not the mean over all labels."""
    rows = ragged_rows(8)
    args = arguments(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        config_overrides={"train.loss_weighting": "microbatches", "run.save_weights": False},
    )
    steps: Steps = []
    Trainer(model_class(), args, train_dataset=rows, callbacks=noting_steps(steps), default_callbacks=False).train()
    means = [by_hand(TokenModel(), rows[start : start + 2], mean_loss)[0] for start in range(0, 8, 2)]
    torch.testing.assert_close(steps[0][0], torch.stack(means).mean(), rtol=1e-6, atol=0)
    assert abs(steps[0][0] - by_hand(TokenModel(), rows, mean_loss)[0]) > 1e-4


def test_what_a_compute_loss_gives_can_be_stated(tmp_path: Path) -> None:
    class Hidden(SharingTrainer):
        """Its code does not tell that the callable divides."""

        loss_is_scaled_for_ga = True

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            values = dict(kwargs)
            return SharingTrainer.compute_loss(self, model, inputs, *args, **values)

    rows = ragged_rows(24)
    expected = by_hand(TokenModel(), rows, mean_loss)
    for micro, accumulation in SPLITS:
        (step,) = steps_of(Hidden, LogitsModel(), rows, tmp_path, micro, accumulation)
        check_equal(step, expected, torch.float32)


def test_a_micro_batch_without_a_label_counts_nothing(tmp_path: Path) -> None:
    rows = ragged_rows(8)
    for row in rows[2:4]:
        row["labels"] = torch.full_like(row["labels"], IGNORE)
    expected = by_hand(TokenModel(dtype=torch.float64), rows, mean_loss)
    for model_class in (TokenModel, CountingTokenModel):
        (step,) = steps_of(Trainer, model_class(dtype=torch.float64), rows, tmp_path / model_class.__name__, 2, 4)
        check_equal(step, expected, torch.float64)
