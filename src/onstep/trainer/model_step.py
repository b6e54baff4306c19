"""Implements the Trainer's forward step for any module and batch through `compute_loss`, and finds the model's loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn

from onstep.data import Batch
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.trainer.loss_convention import MAPPING, NUM_ITEMS, Convention, Labels, accepts_num_items
from onstep.training.compute.batch_notes import contents
from onstep.training.compute.losses import ONE_ELEMENT, LossShare, MeanLoss, described, mean_weight
from onstep.training.compute.step import MicroBatches, to_device

EvaluationWeighting = Literal["labels", "samples", "batches"]
"""What weights the loss of a batch in an evaluation; with "batches", all weigh the same."""


class StepOptions(TypedDict):
    """How the losses of a step are weighted."""

    convention: Convention
    weighting: str
    world: World
    num_averaged_ranks: int
    evaluation_weighting: EvaluationWeighting


class ModelStep:
    """A forward step in Megatron Bridge's form around Hugging Face's `compute_loss`.

    In training, `num_items_in_batch` is the number of labels of the whole step over all ranks, so that the shares of
    micro-batches and ranks add up to the loss of one large batch. In evaluation it is the micro-batch's own number.

    Args:
        convention: the kind of loss that `compute_loss` returns; for a mean it never receives `num_items_in_batch`.
        weighting: `train.loss_weighting`, for means.
        evaluation_weighting: of the loss of a batch in an evaluation.
        num_averaged_ranks: what `compute_loss` has multiplied a share by, for gradients that are averaged over ranks.
    """

    def __init__(
        self,
        compute_loss: Callable[..., Tensor],
        labels: Labels,
        *,
        convention: Convention,
        weighting: str,
        world: World,
        num_averaged_ranks: int = 1,
        evaluation_weighting: EvaluationWeighting = "labels",
    ) -> None:
        self._compute_loss = compute_loss
        self._accepts_num_items = accepts_num_items(compute_loss)
        self._labels = labels
        self._gives_shares = convention == "share"
        self._weighting = weighting
        self._world = world
        self._num_averaged_ranks = num_averaged_ranks
        self._evaluation_weighting = evaluation_weighting
        self._weight_in_evaluation: int | None = None
        """The weight of the current micro-batch of an evaluation, unless that is its labels."""
        self.predict: Callable[[nn.Module, Batch], Tensor | None] | None = None
        """In an evaluation that keeps predictions, called with the model and the inputs; returns the loss."""
        self.is_filler = False
        """Whether the current micro-batch counts as zero, as far as noted: in evaluations, and by a `CustomStep`."""

    def __call__(self, data_iterator: Iterator[Batch], model: nn.Module) -> tuple[object, Callable[..., object]]:
        """Run one micro-batch; returns `(loss, loss function)`. The loss is None for a test without labels."""
        inputs, trains = next(data_iterator), model.training  # which compute_loss may change
        if not trains:
            self.is_filler = isinstance(data_iterator, MicroBatches) and data_iterator.is_filler()
        self._weight_in_evaluation = None if trains else self._evaluation_weight_of(data_iterator)
        measured = self._labels.measure(inputs)
        own_items = measured[0] if self._gives_shares else None
        if own_items is None and self._gives_shares:  # not class ids
            own_items = self._labels.items(inputs)
        num_items = None if own_items is None else self._num_items(data_iterator, model, own_items)
        loss = self._loss(model, inputs, num_items)
        if loss is None and trains:
            raise ConfigError("compute_loss returned None; it must return the loss of the micro-batch.")
        return self._result(loss, inputs, measured, is_share=own_items is not None and trains)

    def _evaluation_weight_of(self, data_iterator: object) -> int | None:
        """The weight of a batch of an evaluation: its samples, 1, or None, which leaves it to its labels."""
        if self._evaluation_weighting == "labels" or not isinstance(data_iterator, MicroBatches):
            return None
        samples = data_iterator.num_samples
        return min(samples, 1) if samples and self._evaluation_weighting == "batches" else samples

    def _result(
        self, loss: Tensor | None, inputs: Batch, measured: tuple[Tensor | float | None, bool], *, is_share: bool
    ) -> tuple[object, Callable[..., object]]:
        """The loss as the loop reads it: a share of the step's, or a mean with its weight.

        Args:
            measured: the number of labels, and whether these are tokens.
        """
        if loss is None:
            return None, lambda loss: None
        num_labels, are_tokens = measured
        if self._num_averaged_ranks > 1:
            loss = loss / self._num_averaged_ranks
        if is_share:
            return loss, lambda loss: LossShare(loss, num_labels, {})
        weight = self._weight_in_evaluation or mean_weight(inputs, num_labels, self._weighting)
        tokens = num_labels if are_tokens else None
        return loss, lambda loss: MeanLoss(loss, weight, tokens, {})

    def _loss(self, model: nn.Module, inputs: Batch, num_items: Tensor | int | None) -> Tensor | None:
        if self.predict is not None:
            return self.predict(model, inputs)
        keywords = {NUM_ITEMS: num_items} if self._accepts_num_items else {}
        given = inputs.copy() if type(inputs) is dict else _copied(inputs)
        return self._compute_loss(model, given, **keywords)

    def loss_and_outputs(self, model: nn.Module, inputs: Batch) -> tuple[Tensor, object]:
        """The loss of a micro-batch of an evaluation, and the model's outputs.

        Raises:
            ConfigError: if `compute_loss` returns no outputs.
        """
        keywords = {}
        if self._accepts_num_items:
            keywords[NUM_ITEMS] = self._labels.items(inputs) if self._gives_shares else None
        result = self._compute_loss(model, _copied(inputs), return_outputs=True, **keywords)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ConfigError(
                f"compute_loss(..., return_outputs=True) must return (loss, outputs), got {type(result).__name__}; "
                f"the outputs are needed for compute_metrics and predict."
            )
        return result

    def _num_items(self, data_iterator: Iterator[Batch], model: nn.Module, num_labels: Tensor) -> Tensor:
        if not (model.training and isinstance(data_iterator, MicroBatches)):
            return num_labels
        items = data_iterator.items
        if NUM_ITEMS not in items:
            is_whole_step = len(data_iterator) == 1 and self._world.data.size == 1 and not data_iterator.is_filler()
            items[NUM_ITEMS] = num_labels.clamp(min=1) if is_whole_step else self._count_step(data_iterator)
        counted: Tensor = items[NUM_ITEMS]
        return counted

    def _count_step(self, micro_batches: MicroBatches) -> Tensor:
        """Count the labels of the whole step over all ranks. Collective: called with a step's first micro-batch."""
        counted = self.count_items(counted_micro_batches(micro_batches), over_ranks=True)
        assert counted is not None  # only shares are counted
        return counted

    def count_items(self, batches: list[Batch], *, over_ranks: bool) -> Tensor | None:
        """The labels in micro-batches, at least 1; None for a loss that is a mean. Collective with `over_ranks`."""
        if not self._gives_shares:
            return None
        counts = [count for count in map(self._labels.items, batches) if count is not None]
        total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
        moved: Tensor = to_device(total, self._world.device)
        return (self._world.data.sum(moved.clone()) if over_ranks else moved).clamp(min=1)


def counted_micro_batches(micro_batches: MicroBatches) -> list[Batch]:
    """The micro-batches of a step on this rank, on the host, without fillers."""
    step = micro_batches.batches
    return [batch for batch, is_filler in zip(step.micro_batches, step.is_filler, strict=True) if not is_filler]


def _copied(inputs: Batch) -> Batch:
    """A copy, since a `compute_loss` may pop the labels."""
    return copy.copy(inputs) if isinstance(inputs, MAPPING) else inputs


def call_model(model: nn.Module, inputs: Batch) -> object:
    """The model's outputs: a mapping is passed as keywords, a tuple or list by position, a tensor directly."""
    if isinstance(inputs, MAPPING):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)


def model_loss(model: nn.Module, inputs: Batch, further: dict[str, object]) -> tuple[Tensor, object]:
    """The loss that the model itself returns, and its outputs. A mapping of inputs is extended with `further`.

    Raises:
        ConfigError: if the model returns no loss.
    """
    if further and isinstance(inputs, MAPPING):
        inputs = {**inputs, **further}
    outputs = model(**inputs) if type(inputs) is dict else call_model(model, inputs)
    loss = find_loss(outputs)
    if loss is None:
        found = None if isinstance(outputs, Tensor) else _loss_entry(outputs)
        if found is not None:
            raise ConfigError(f"The loss that {type(model).__name__} returned is {described(found)}; {ONE_ELEMENT}.")
        given = f" It received {', '.join(inputs)}." if isinstance(inputs, MAPPING) else ""
        is_none = isinstance(outputs, MAPPING) and "loss" in outputs
        what = f"{described(outputs)} whose 'loss' is None" if is_none else f"no loss but {described(outputs)}"
        raise ConfigError(
            f"{type(model).__name__} returned {what}.{given} Return a dict with a 0-d "
            f"'loss' or a tuple that starts with it, pass the labels that the model needs, as numbers (strings "
            f"are dropped), or use compute_loss_func(outputs, labels)."
        )
    return loss, outputs


def function_loss(
    compute_loss_func: Callable[..., Tensor], model: nn.Module, inputs: Batch, further: dict[str, object]
) -> tuple[Tensor, object]:
    """The loss that a user's function returns for the outputs, labels and `further` keywords, and the outputs.

    The labels, `labels` of a mapping or the last element of a tuple, are not passed to the model.
    """
    labels = None
    if isinstance(inputs, MAPPING):
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
    elif isinstance(inputs, (list, tuple)) and len(inputs) > 1:
        inputs, labels = inputs[:-1], inputs[-1]
    outputs = call_model(model, inputs)
    try:
        return compute_loss_func(outputs, labels, **further), outputs
    except Exception as error:
        error.add_note(
            f"raised by compute_loss_func, called with the outputs of {type(model).__name__} ({contents(outputs)}) and "
            f"the labels ({contents(labels)})"
        )
        raise


def find_loss(outputs: object) -> Tensor | None:
    """The loss in a model's outputs: `loss`, the first element of a tuple, or the output itself; one element."""
    loss = outputs.get("loss") if isinstance(outputs, MAPPING) else _loss_entry(outputs)  # mostly without a call
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        return None
    return loss.reshape(()) if loss.ndim else loss


def _loss_entry(outputs: object) -> object:
    """What a model returned as its loss; None if it returned none."""
    if isinstance(outputs, MAPPING):
        return outputs.get("loss")
    if hasattr(outputs, "loss"):
        return outputs.loss
    if isinstance(outputs, (list, tuple)):
        return outputs[0] if outputs else None
    return outputs
