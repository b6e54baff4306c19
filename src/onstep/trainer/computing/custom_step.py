"""The forward step of a Trainer that overrides one of Hugging Face's methods of a micro-batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from onstep.data import Batch
from onstep.errors import ConfigError
from onstep.models.generation.generate import inner_transformer
from onstep.trainer.loss_convention import NUM_ITEMS, Labels
from onstep.trainer.model_step import ModelStep, StepOptions, counted_micro_batches
from onstep.trainer.overrides import overrides
from onstep.training.compute.losses import LossShare, as_scalar, mean_weight
from onstep.training.compute.step import MicroBatches

METHODS = (
    "training_step",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
    "_prepare_inputs",
    "_prepare_input",
    "_get_num_items_in_batch",
    "_prepare_context_parallel_inputs",
    "get_batch_samples",
)
"""The methods that this step calls."""


class CustomStep(ModelStep):
    """A `ModelStep` that calls the methods of a micro-batch, at the places where Hugging Face's Trainer does.

    An overridden `training_step` has run its backward pass when it returns, so the loop runs none. Its losses and
    gradients are averaged over ranks, as in Hugging Face's Trainer; what is a share of the step's loss is multiplied by
    the number of ranks before.

    Raises:
        ConfigError: for a `training_step` and a model whose experts have auxiliary losses.
    """

    def __init__(self, trainer: Any, labels: Labels, *, scales_shares: bool, **options: Unpack[StepOptions]) -> None:
        super().__init__(trainer.compute_loss, labels, **options)
        self._trainer = trainer
        self._scales_shares = scales_shares
        """Whether the Trainer's own `compute_loss` gives the share, and multiplies it by the number of ranks itself."""
        self.runs_backward = overrides(trainer, "training_step")
        parameters = inspect.signature(trainer.training_step).parameters.values()
        self._passes_items = len(parameters) > 2 or any(one.kind is one.VAR_POSITIONAL for one in parameters)
        """Whether `training_step` has a third parameter, which transformers 4.45 and earlier did not pass."""
        self.given_items: tuple[Tensor | int | None] | None = None
        """The `num_items_in_batch` of the step that an overridden `get_batch_samples` has returned."""
        self._weight: Tensor | float = 1.0
        self._total_weight: Any = None
        transformer = inner_transformer(trainer.model)
        if self.runs_backward and transformer is not None and transformer.config.num_moe_experts:
            raise ConfigError(
                f"{type(trainer).__name__} overrides training_step, whose backward pass cannot weight the auxiliary "
                f"losses of experts; override compute_loss instead."
            )

    def __call__(self, data_iterator: Iterator[Batch], model: nn.Module) -> tuple[object, Callable[..., object]]:
        """Run one micro-batch, and its backward pass if `training_step` is overridden."""
        inputs = next(data_iterator)
        step = data_iterator if model.training and isinstance(data_iterator, MicroBatches) else None
        self.is_filler = isinstance(data_iterator, MicroBatches) and data_iterator.is_filler()
        self._weight_in_evaluation = None if step is not None else self._evaluation_weight_of(data_iterator)
        num_items = self._items_in(step, inputs)
        if step is not None and self.runs_backward:
            return self._trained(model, inputs, num_items)
        parallel: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.predict is None:  # prediction_step prepares its inputs itself
            parallel, inputs = self._trainer._prepare_context_parallel_inputs(model, inputs)
            inputs = self._trainer._prepare_inputs(inputs)
        measured = self._labels.measure(inputs)
        with parallel(), self._trainer.compute_loss_context_manager():
            loss = self._loss(model, inputs, num_items)
        if loss is None and step is not None:
            raise ConfigError("compute_loss returned None; it must return the loss of the micro-batch.")
        is_share = self._gives_shares and num_items is not None and step is not None
        return self._result(loss, inputs, measured, is_share=is_share)

    def part_of_step(self, loss: Tensor) -> Tensor:
        """The part of a loss from `compute_loss` in the loss of its step, as it is averaged over ranks."""
        size = self._world.data.size
        if self._gives_shares:
            is_scaled = size == 1 or self._scales_shares or self._num_averaged_ranks > 1
            return loss if is_scaled else loss * size
        if self._total_weight is None:
            return loss
        factor = self._weight * size / self._total_weight
        return loss * (factor.to(loss) if isinstance(factor, Tensor) else factor)

    def portion_of(self, part: Batch, micro_batches: list[Batch]) -> tuple[float, float] | None:
        """What a part of the step counts in its loss, and what a loss of that part has to be multiplied by for that.

        Args:
            part: some samples of a micro-batch.
            micro_batches: those of the last step that was computed, on this rank.

        Returns:
            None for a `compute_loss` that returns shares, or a backward pass that the loop runs.
        """
        if self._gives_shares or not self.runs_backward:
            return None
        weight = float(self._weight_of(part))
        if self._total_weight is not None:
            return weight / float(self._total_weight), 1.0
        portion = weight / max(sum(float(self._weight_of(one)) for one in micro_batches), 1.0)
        return portion, portion

    def _items_in(self, step: MicroBatches | None, inputs: Batch) -> Tensor | int | None:
        """The result of `_get_num_items_in_batch`, once for a step."""
        device = self._world.device
        if step is None:
            items: Tensor | int | None = self._trainer._get_num_items_in_batch([inputs], device)
            return items
        if NUM_ITEMS not in step.items:
            counted = counted_micro_batches(step)
            if self.given_items is None:
                step.items[NUM_ITEMS] = self._trainer._get_num_items_in_batch(counted, device)
            else:
                step.items[NUM_ITEMS] = self.given_items[0]
            if self.runs_backward and not self._gives_shares:
                self._total_weight = self._weigh(step, counted)
        known: Tensor | int | None = step.items[NUM_ITEMS]
        return known

    def _weigh(self, step: MicroBatches, counted: list[Batch]) -> Tensor | float | None:
        """The weight of all means of a step over all ranks; None for the only one. Collective."""
        if self._world.data.size == 1 and len(step) == 1:
            return None
        total = sum(float(self._weight_of(batch)) for batch in counted)
        if self._world.data.size == 1:
            return max(total, 1.0)
        return self._world.data.sum(as_scalar(total, torch.float64, self._world.device)).clamp(min=1)

    def _weight_of(self, batch: Batch) -> Tensor | float:
        return mean_weight(batch, self._labels.count(batch), self._weighting)

    def _trained(
        self, model: nn.Module, inputs: Batch, num_items: Tensor | int | None
    ) -> tuple[Tensor, Callable[..., object]]:
        trainer, size = self._trainer, self._world.data.size
        if not self._gives_shares:
            self._weight = self._weight_of(inputs)
        given = [copy.copy(inputs) if isinstance(inputs, Mapping) else inputs]
        given += [num_items] if self._passes_items else []
        trainer.num_averaged_ranks = size if self._gives_shares and self._scales_shares else 1
        try:
            if self.is_filler:
                with _without_gradients(model):
                    loss = trainer.training_step(model, *given)
            else:
                loss = trainer.training_step(model, *given)
        finally:
            trainer.num_averaged_ranks = 1
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"{type(trainer).__name__}.training_step must return the loss of the micro-batch, a detached tensor of "
                f"one element, got {type(loss).__name__}."
            )
        loss = loss.detach().reshape(())
        loss = torch.zeros_like(loss) if self.is_filler else loss if size == 1 else loss / size
        num_labels, are_tokens = self._labels.measure(inputs)
        return loss, lambda loss: LossShare(loss, num_labels if self._gives_shares or are_tokens else None, {})


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Backward passes in this context add zeros to the gradients, and take part in their exchange."""
    parameters: list[Any] = [one for one in model.parameters() if one.requires_grad]
    hooks = [one.register_hook(torch.zeros_like) for one in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
