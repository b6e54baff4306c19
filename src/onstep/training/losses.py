"""One loss for any split of a step into micro-batches and ranks.

A forward step's loss function may return, as in Megatron Bridge,

- `(loss_sum, num_tokens, report)`: exact for every split;
- `(loss, report)` or a bare loss: the mean over the micro-batch. It is weighted by the micro-batch's labels where they
  are known, else by its samples, or as `train.loss_weighting` says;
- `LossShare(loss, num_items, report)`: the micro-batch's share of the step's loss, already divided by the `num_items`
  of the whole step (Hugging Face's `num_items_in_batch`).

Every backward pass starts from `loss * weight / nominal`, with one `nominal` for all micro-batches and ranks; when the
step's true weight is known, gradients are scaled once by `nominal / weight`, folded into clipping. float16 multiplies
the start by its loss scale, which the same factor takes back.

The mean over no labels at all is NaN and counts nothing. Its gradients must be zeros, as those of torch's losses are: a
sum divided by a count of 0 has NaN gradients, and the step is refused as not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.training.backward import run_backward

Weight = Tensor | float
Kind = Literal["sum", "mean", "share"]
IGNORE_INDEX = -100
"""Labels with this value are not trained on."""


class LossShare(NamedTuple):
    """A micro-batch's share of the step's loss."""

    loss: Tensor
    num_items: Weight
    """Items of this micro-batch on this rank."""
    report: Mapping[str, Any]


class MeanLoss(NamedTuple):
    """The mean loss of a micro-batch, with the weight that the forward step knows better than the loop."""

    loss: Tensor
    weight: Weight
    tokens: Weight | None
    report: Mapping[str, Any]


@dataclass(slots=True)
class MicroLoss:
    """The loss of one micro-batch."""

    loss: Tensor
    weight: Weight
    """Tokens or samples that it stands for; 0 for a filler."""
    kind: Kind
    report: Mapping[str, Any]
    tokens: Weight | None
    """Labels trained on, where known."""

    def backward(self, start: Weight | None) -> None:
        """Backward from `loss * start`; None is 1."""
        if start is None:
            run_backward(self.loss)
            return
        loss = self.loss
        if isinstance(start, Tensor):
            gradient = start.to(device=loss.device, dtype=loss.dtype)
        else:
            gradient = as_scalar(start, loss.dtype, loss.device)
        loss.backward(gradient.reshape(loss.shape))  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class StepLoss:
    """The loss of one step over all its micro-batches and ranks; the value is `numerator / weight`."""

    numerator: Tensor
    weight: Weight
    tokens: Weight | None
    reports: dict[str, Tensor] = field(default_factory=dict)

    def value(self) -> Tensor:
        """0-d tensor on the device."""
        return self.numerator if _is_one(self.weight) else self.numerator / at_least_one(self.weight)


def read_loss(result: Any, batch: Any, weighting: str, is_filler: bool) -> MicroLoss:
    """Make sense of what a loss function returned.

    Raises:
        TypeError: when it is none of the documented forms.
    """
    if isinstance(result, LossShare):
        items = 0 if is_filler else result.num_items
        return MicroLoss(result.loss, items, "share", result.report, items)
    if isinstance(result, MeanLoss):
        loss, weight, tokens, report = result
        return MicroLoss(loss, 0 if is_filler else weight, "mean", report, 0 if is_filler else tokens)
    if isinstance(result, tuple) and len(result) == 3:
        loss, num_tokens, report = result
        weight = 0 if is_filler else num_tokens
        return MicroLoss(loss, weight, "sum", report, weight)
    if isinstance(result, Tensor):
        result = (result, {})
    if isinstance(result, tuple) and len(result) == 2:
        loss, report = result
        if is_filler:
            return MicroLoss(loss, 0, "mean", report, 0)
        tokens = count_labels(batch)
        weight = mean_weight(batch, tokens, weighting) if tokens is None or weighting != "auto" else tokens
        return MicroLoss(loss, weight, "mean", report, tokens)
    raise TypeError(
        f"The loss function returned {type(result).__name__}; it must return (loss_sum, num_tokens, report), "
        f"(mean_loss, report) or a mean loss."
    )


def mean_weight(batch: Any, labels: Weight | None, weighting: str) -> Weight:
    """How much a mean loss over `batch` counts: its labels, its samples, or 1.

    Raises:
        ConfigError: where tokens are asked for and the micro-batch has no labels to count.
    """
    if weighting == "samples" or (weighting == "auto" and labels is None):
        return float(count_samples(batch))
    if weighting == "microbatches":
        return 1.0
    if labels is None:
        raise ConfigError(
            "train.loss_weighting=tokens counts the `labels` (batch, seq) of a micro-batch and this one has none; use "
            "train.loss_weighting=samples, or return (loss_sum, num_tokens, report) from the loss function."
        )
    return labels


def count_labels(batch: Any, *, causal: bool = False) -> Weight | None:
    """Labels of a micro-batch that are trained on, as a 0-d tensor; None where it has no sequence labels.

    `causal` leaves out the first position of each row, which a model that shifts its labels never predicts.
    """
    if type(batch) is not dict and not isinstance(batch, Mapping):
        return None
    known = batch.get("num_tokens")
    if isinstance(known, int):
        return known
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
        return None
    return (labels[:, 1:] if causal else labels).ne(IGNORE_INDEX).sum()


def count_samples(batch: Any) -> int:
    """Rows of the first tensor in a micro-batch; 1 where there is none."""
    if type(batch) is dict or isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        batch = (batch,)
    for value in batch:
        if isinstance(value, Tensor) and value.ndim > 0:
            return int(value.shape[0])
        if isinstance(value, (list, tuple, Mapping)):
            return count_samples(value)
    return 1


def backward_start(
    micro: MicroLoss, alone: bool, nominal: float, world_size: int, loss_scale: float | None = None
) -> Weight | None:
    """What a micro-batch's backward pass starts from; None is 1.

    `alone` is a step of one micro-batch on one rank, whose weight is known at once. Data parallelism divides the summed
    gradients by the number of ranks; a share must not be divided.
    """
    kind, weight = micro.kind, micro.weight
    start: Weight | None = None
    if kind == "share" and _is_nothing(weight):
        start = 0.0
    elif kind == "share":
        start = None if world_size == 1 else float(world_size)
    elif kind == "mean":
        start = None if alone else weight / nominal
    elif alone:
        start = 1.0 / _divisor(weight, micro.loss)
    else:
        start = 0.0 if _is_nothing(weight) else 1.0 / nominal
    if loss_scale is None:
        return start
    return loss_scale if start is None else start * loss_scale


def reduce_step(micros: list[MicroLoss], world: World) -> StepLoss:
    """Add up micro-batches and ranks. Collective where there are several ranks: one SUM of a small vector.

    Raises:
        TypeError: when the micro-batches' losses do not go together.
        ValueError: for a report that is neither a mean nor sum and count, or that some micro-batches lack.
    """
    first = micros[0]
    if len(micros) == 1 and world.size == 1 and not first.report:
        return StepLoss(_counted(first), first.weight if first.kind == "sum" else 1.0, first.tokens)
    _check_kinds(micros)
    numerator, weight, tokens = local_sums(micros)
    keys = sorted({key for micro in micros for key in micro.report})
    reports = [_local_report(micros, key) for key in keys]
    if world.size > 1:
        dtype = numerator.dtype
        numerator, weight, tokens, reports = _over_ranks(world, numerator, weight, tokens, reports)
        numerator = numerator.to(dtype)
    values = {key: _mean(top, bottom, numerator) for key, (top, bottom) in zip(keys, reports, strict=True)}
    return StepLoss(numerator, 1.0 if first.kind == "share" else weight, tokens, values)


def evaluation_sums(micros: list[MicroLoss], world: World) -> dict[str, tuple[Tensor, Tensor]]:
    """(numerator, weight) of the loss, under the key `loss`, and of everything reported, in float64. Collective."""
    numerator, weight, tokens = local_sums(micros)
    keys = sorted({key for micro in micros for key in micro.report} - {"loss"})
    reports = [_local_report(micros, key) for key in keys]
    if world.size > 1:
        numerator, weight, tokens, reports = _over_ranks(world, numerator, weight, tokens, reports)
    if micros[0].kind == "share":
        numerator = numerator.double() * weight
    pairs = {"loss": (numerator, weight), **dict(zip(keys, reports, strict=True))}
    device = numerator.device
    return {
        key: (as_scalar(top, torch.float64, device), as_scalar(bottom, torch.float64, device))
        for key, (top, bottom) in pairs.items()
    }


def as_scalar(value: Weight, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value` as a tensor on the device; a number gets there by a fill, for which the host need not wait."""
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)


def gradient_factor(step: StepLoss, micros: list[MicroLoss], nominal: float, world_size: int) -> Weight | None:
    """What gradients are multiplied with, once the step's weight is known; None is 1."""
    if micros[0].kind == "share" or (len(micros) == 1 and world_size == 1):
        return None
    factor = nominal * world_size / _divisor(step.weight, step.numerator)
    return None if _is_one(factor) else factor


def at_least_one(weight: Weight) -> Weight:
    """A weight to divide by: a step without a single label has a zero loss, not a NaN."""
    return weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)


def _divisor(weight: Weight, loss: Tensor) -> Weight:
    """`at_least_one(weight)`, as precise as the loss: dividing by a count as it is gives float32 in any model."""
    if not isinstance(weight, Tensor):
        return max(weight, 1)
    return weight.clamp(min=1).to(torch.promote_types(loss.dtype, torch.float32))


def _mean(top: Any, bottom: Weight, like: Tensor) -> Tensor:
    """`top / bottom` as a tensor like the loss, also where a forward step reported plain numbers."""
    return as_scalar(top / at_least_one(bottom), like.dtype, like.device)


def _is_one(weight: Weight) -> bool:
    return not isinstance(weight, Tensor) and weight == 1


def local_sums(micros: list[MicroLoss]) -> tuple[Tensor, Weight, Weight | None]:
    """(numerator, weight, labels) of some micro-batches on this rank; labels are None where they are not known."""
    numerator: Any = 0
    weight: Any = 0
    tokens: Any = 0
    for micro in micros:
        loss = _counted(micro)
        numerator = numerator + (loss * micro.weight if micro.kind == "mean" else loss)
        weight = weight + micro.weight
        tokens = None if tokens is None or micro.tokens is None else tokens + micro.tokens
    return numerator, weight, tokens


def _counted(micro: MicroLoss) -> Tensor:
    """The loss of a micro-batch, 0 for a filler and for the mean over no labels at all, which is NaN."""
    loss, weight = micro.loss, micro.weight
    if loss.requires_grad:
        loss = loss.detach()
    if not isinstance(weight, Tensor):
        return torch.zeros_like(loss) if weight == 0 else loss
    return loss.masked_fill(weight == 0, 0.0) if micro.kind == "mean" else loss


def _is_nothing(weight: Weight) -> bool:
    """Whether the host knows that a micro-batch counts nothing."""
    return not isinstance(weight, Tensor) and weight == 0


def _check_kinds(micros: list[MicroLoss]) -> None:
    """Shares of a step's loss cannot be added to losses of micro-batches."""
    if len({micro.kind == "share" for micro in micros}) > 1:
        raise TypeError(
            "The loss function returned a LossShare for some micro-batches of a step and something else for others; "
            "return one of them for all."
        )


def _local_report(micros: list[MicroLoss], key: str) -> tuple[Tensor, Weight]:
    top: Any = 0
    bottom: Any = 0
    for micro in micros:
        if key not in micro.report:
            raise ValueError(f"{key!r} is reported for some micro-batches of a step only; report it for all of them.")
        value = micro.report[key]
        parts = value if isinstance(value, tuple) else torch.as_tensor(value).flatten()
        pair = [part.detach() if isinstance(part, Tensor) else part for part in parts]
        if len(pair) not in (1, 2):
            raise ValueError(
                f"Invalid value shape: {_shape(value)} for key {key}; report a mean (1 element), or sum and count (2)."
            )
        if _is_nothing(micro.weight):
            top, bottom = top + pair[0] * 0, bottom + pair[-1] * 0
        elif len(pair) == 2:
            top, bottom = top + pair[0], bottom + pair[1]
        else:
            top, bottom = top + _weighted(pair[0], micro.weight), bottom + micro.weight
    return top, bottom


def _weighted(mean: Any, weight: Weight) -> Any:
    """`mean * weight`, where the mean over nothing (NaN) counts nothing."""
    if isinstance(weight, Tensor) and isinstance(mean, Tensor):
        return (mean * weight).masked_fill(weight == 0, 0.0)
    return mean * weight


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else (len(value),)


def _over_ranks(
    world: World, numerator: Tensor, weight: Weight, tokens: Weight | None, reports: list[tuple[Tensor, Weight]]
) -> tuple[Tensor, Tensor, Tensor | None, list[tuple[Tensor, Weight]]]:
    parts = [numerator, weight, -1.0 if tokens is None else tokens]
    for top, bottom in reports:
        parts += [top, bottom]
    # float64 keeps token counts whole; MPS has none, but no process group either
    vector = torch.stack([as_scalar(part, torch.float64, numerator.device) for part in parts])
    world.sum(vector)
    pairs: list[tuple[Tensor, Weight]] = [(vector[i], vector[i + 1]) for i in range(3, len(parts), 2)]
    return vector[0], vector[1], None if tokens is None else vector[2], pairs
