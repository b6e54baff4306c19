"""The Trainer's forward step: any module, any batch, through `compute_loss`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onstep.distributed import World
from onstep.trainer.loss_convention import Convention
from onstep.trainer.predictions import PredictionCollector
from onstep.training.devices import to_device
from onstep.training.losses import LossShare, MeanLoss, Weight, count_labels, mean_weight
from onstep.training.step import MicroBatches


class ModelStep:
    """A forward step in Megatron Bridge's form around Hugging Face's `compute_loss`.

    While training, `num_items_in_batch` is the number of labels of the whole step over all ranks, so that the shares of
    micro-batches and ranks add up to the loss of one big batch. In evaluation it is the micro-batch's own.
    """

    def __init__(
        self,
        compute_loss: Callable[..., Any],
        *,
        convention: Convention,
        causal: bool,
        weighting: str,
        world: World,
    ) -> None:
        self._compute_loss = compute_loss
        self._convention: Convention = convention if weighting == "auto" else "mean"
        self._causal = causal
        self._weighting = weighting
        self._world = world
        self.collector: PredictionCollector | None = None

    def __call__(self, data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        """Run one micro-batch; returns `(loss, loss function)`."""
        inputs = next(data_iterator)
        labels = count_labels(inputs, causal=self._causal)
        is_share = self._convention == "share" and labels is not None
        num_items = self._num_items(data_iterator, model, labels) if is_share else None
        wants_outputs = self.collector is not None
        # a compute_loss may pop the labels, which the collector still needs
        handed = copy.copy(inputs) if wants_outputs else inputs
        result = self._compute_loss(model, handed, return_outputs=wants_outputs, num_items_in_batch=num_items)
        loss, outputs = result if wants_outputs else (result, None)
        if self.collector is not None:
            filler = isinstance(data_iterator, MicroBatches) and data_iterator.is_filler()
            self.collector.add(inputs, outputs, True, filler)
        if is_share and model.training:
            return loss, lambda value: LossShare(value, _known(labels), {})
        weight = mean_weight(inputs, labels, self._weighting)
        return loss, lambda value: MeanLoss(value, weight, labels, {})

    def _num_items(self, data_iterator: Iterator[Any], model: nn.Module, labels: Weight | None) -> Any:
        if not (model.training and isinstance(data_iterator, MicroBatches)):
            return labels
        items = data_iterator.items
        if "num_items" not in items:
            items["num_items"] = self._count_step(data_iterator)
        return items["num_items"]

    def _count_step(self, micro_batches: MicroBatches) -> Tensor:
        """Labels of the whole step over all ranks. Collective: called with the first micro-batch of a step."""
        batches = micro_batches.batches
        counts = [
            torch.as_tensor(count_labels(batch, causal=self._causal))
            for batch, filler in zip(batches.micro_batches, batches.is_filler, strict=True)
            if not filler
        ]
        total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
        total = to_device(total, self._world.device)
        return self._world.sum(total.clone()).clamp(min=1)


def default_compute_loss(
    model: nn.Module,
    inputs: Any,
    *,
    compute_loss_func: Callable[..., Any] | None,
    passes_num_items: bool,
    num_items_in_batch: Any,
) -> tuple[Tensor, Any]:
    """Call the model and find its loss: `(loss, outputs)`.

    Raises:
        ValueError: when neither the model nor a function gives a loss.
    """
    labels = None
    if isinstance(inputs, Mapping):
        keywords = dict(inputs)
        if compute_loss_func is not None:
            labels = keywords.pop("labels", None)
        elif passes_num_items and num_items_in_batch is not None:
            keywords["num_items_in_batch"] = num_items_in_batch
        outputs = model(**keywords)
    elif isinstance(inputs, (list, tuple)) and len(inputs) > 1:
        labels = inputs[-1]
        outputs = model(*inputs[:-1])
    else:
        outputs = model(inputs)
    if compute_loss_func is not None:
        if passes_num_items:
            return compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch), outputs
        return compute_loss_func(outputs, labels), outputs
    return loss_of(outputs), outputs


def loss_of(outputs: Any) -> Tensor:
    """The loss in a model's outputs.

    Raises:
        ValueError: when there is none.
    """
    loss: Tensor | None = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if loss is None and isinstance(outputs, (list, tuple)) and outputs and isinstance(outputs[0], Tensor):
        loss = outputs[0]
    if loss is None and isinstance(outputs, Tensor) and outputs.ndim == 0:
        loss = outputs
    if loss is None or loss.ndim > 0:
        raise ValueError(
            "The model returned no loss. Let it return a dict with a 0-d `loss`, a tuple that starts with it, or pass "
            "compute_loss_func(outputs, labels)."
        )
    return loss


def _known(labels: Weight | None) -> Weight:
    return 0 if labels is None else labels
