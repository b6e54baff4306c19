"""The Trainer's forward step: any module, any batch, through `compute_loss`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.trainer.forward import call_model, find_loss
from onstep.trainer.labels import Labels
from onstep.trainer.loss_convention import NUM_ITEMS, Convention, accepts_num_items
from onstep.trainer.predictions import PredictionCollector
from onstep.training.losses import LossShare, MeanLoss, mean_weight
from onstep.training.micro_batches import MicroBatches, to_device


class ModelStep:
    """A forward step in Megatron Bridge's form around Hugging Face's `compute_loss`.

    While training, `num_items_in_batch` is the number of labels of the whole step over all ranks, so that the shares of
    micro-batches and ranks add up to the loss of one big batch. In evaluation it is the micro-batch's own.

    Args:
        convention: what `compute_loss` gives; a mean is never handed `num_items_in_batch`.
        weighting: `train.loss_weighting`, for means.
    """

    def __init__(
        self, compute_loss: Callable[..., Any], labels: Labels, *, convention: Convention, weighting: str, world: World
    ) -> None:
        self._compute_loss = compute_loss
        self._accepts_num_items = accepts_num_items(compute_loss)
        self._labels = labels
        self._gives_shares = convention == "share"
        self._weighting = weighting
        self._world = world
        self.collector: PredictionCollector | None = None
        """Takes the outputs of an evaluation, where somebody wants them."""

    def __call__(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        """Run one micro-batch; returns `(loss, loss function)`. The loss is None for a test without labels."""
        inputs = next(data_iterator)
        num_labels, are_tokens = self._labels.measure(inputs)
        shared_labels = num_labels if self._gives_shares else None
        num_items = None if shared_labels is None else self._num_items(data_iterator, model, shared_labels)
        loss = self._loss(data_iterator, model, inputs, num_items)
        if loss is None:
            return None, lambda loss: None
        if shared_labels is not None and model.training:
            return loss, lambda loss: LossShare(loss, shared_labels, {})
        weight = mean_weight(inputs, num_labels, self._weighting)
        tokens = num_labels if are_tokens else None
        return loss, lambda loss: MeanLoss(loss, weight, tokens, {})

    def _loss(self, data_iterator: Iterator[Any], model: nn.Module, inputs: Any, num_items: Any) -> Any:
        keywords = {NUM_ITEMS: num_items} if self._accepts_num_items else {}
        # a copy, since a compute_loss may pop the labels
        given = inputs.copy() if type(inputs) is dict else copy.copy(inputs) if isinstance(inputs, Mapping) else inputs
        collector = self.collector
        if collector is None:
            return self._compute_loss(model, given, **keywords)
        if collector.is_test and self._labels.of(inputs) is None:
            outputs = call_model(model, given)
            loss = find_loss(outputs)
        else:
            loss, outputs = _pair(self._compute_loss(model, given, return_outputs=True, **keywords))
        is_filler = isinstance(data_iterator, MicroBatches) and data_iterator.is_filler()
        collector.add(inputs, outputs, loss, is_filler)
        return loss

    def _num_items(self, data_iterator: Iterator[Any], model: nn.Module, num_labels: Tensor) -> Tensor:
        if not (model.training and isinstance(data_iterator, MicroBatches)):
            return num_labels
        items = data_iterator.items
        if NUM_ITEMS not in items:
            is_whole_step = len(data_iterator) == 1 and self._world.size == 1 and not data_iterator.is_filler()
            items[NUM_ITEMS] = num_labels.clamp(min=1) if is_whole_step else self._count_step(data_iterator)
        counted: Tensor = items[NUM_ITEMS]
        return counted

    def _count_step(self, micro_batches: MicroBatches) -> Tensor:
        """Labels of the whole step over all ranks. Collective: called with the first micro-batch of a step."""
        step = micro_batches.batches
        counted = [
            self._labels.count(batch)
            for batch, is_filler in zip(step.micro_batches, step.is_filler, strict=True)
            if not is_filler
        ]
        counts = [count for count in counted if count is not None]
        total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
        moved: Tensor = to_device(total, self._world.device)
        return self._world.sum(moved.clone()).clamp(min=1)


def _pair(result: Any) -> tuple[Tensor, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"compute_loss(..., return_outputs=True) must return (loss, outputs), got {type(result).__name__}; the "
            f"outputs are what compute_metrics and predict are made from."
        )
    loss, outputs = result
    return loss, outputs
