"""Sums losses over the micro-batches and ranks of a step or of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed import World
from onstep.errors import ConfigError, LossError
from onstep.training.compute.losses import Kind, MicroLoss, Scalar, as_scalar, described

_MIXED = (
    "The loss function returned a LossShare for some micro-batches of a step and something else for others; return the "
    "same type for all."
)
_REPORT = "a dict of means, or of (sum, count), by name"


LocalSums = tuple[Tensor, Scalar, Scalar | None]
"""(numerator, weight, labels) of some micro-batches on this rank; labels are None if unknown."""


@dataclass(slots=True)
class StepLoss:
    """The loss of one step over all its micro-batches and ranks; the value is `numerator / weight`."""

    numerator: Tensor
    weight: Scalar
    tokens: Scalar | None
    reports: dict[str, Tensor] = field(default_factory=dict)
    kind: Kind = "sum"
    """What the loss function returned."""
    own: LocalSums | None = None
    """The sums over this rank's samples, where its part of the model ends in no loss."""

    def value(self) -> Tensor:
        """0-d tensor on the device."""
        return self.numerator if is_known(self.weight, 1) else self.numerator / at_least_one(self.weight)


@dataclass(frozen=True)
class LossForm:
    """What the losses of a run look like: what a rank must know that has none, but shares the sums of those that do."""

    kind: Kind
    counts_tokens: bool
    keys: tuple[str, ...]
    """The names of what is reported."""
    dtype: torch.dtype


@dataclass
class LossForms:
    """The forms of losses that the ranks have agreed on, by what they are of."""

    known: dict[str, LossForm | None] = field(default_factory=dict)
    source: int = 0
    """The rank of this pipeline that has losses, once one has had any."""


def reduce_step(micros: list[MicroLoss], world: World, forms: LossForms | None = None) -> StepLoss:
    """Sum over micro-batches and ranks. Collective with several ranks: one sum of a small vector, or its broadcast.

    Args:
        micros: none on a rank without losses, in a pipeline.
        forms: kept from step to step; required in a pipeline.

    Raises:
        LossError: if the micro-batches' losses cannot be combined.
        ConfigError: for a report that is not a dict of numbers, is neither a mean nor sum and count, or that some
            micro-batches lack.
    """
    if forms is not None and world.sizes.pp > 1:
        return _staged_step(micros, world, forms)
    first = micros[0]
    if len(micros) == 1 and world.data.num_parts == 1 and not first.report:
        return StepLoss(_counted(first), first.weight if first.kind == "sum" else 1.0, first.tokens, kind=first.kind)
    if len({micro.kind == "share" for micro in micros}) > 1:
        raise LossError(_MIXED)
    local = local_sums(micros)
    numerator, weight, tokens, reports = _sums(micros, local, world)
    dtype, device = local[0].dtype, numerator.device
    means = {key: as_scalar(top / at_least_one(bottom), dtype, device) for key, (top, bottom) in reports.items()}
    return StepLoss(numerator.to(dtype), 1.0 if first.kind == "share" else weight, tokens, means, first.kind)


def evaluation_sums(
    micros: list[MicroLoss], world: World, forms: LossForms | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """(numerator, weight) of the loss, under the key `loss`, and of everything reported, in float64. Collective.

    Args:
        micros: none on a rank without losses, in a pipeline.
        forms: kept from batch to batch; required in a pipeline.
    """
    weight: Scalar
    if forms is not None and world.sizes.pp > 1:
        form, matrix = _staged_sums(micros, world, forms, "evaluation", without="loss")
        if form is None:
            return {}
        (numerator, weight, _), reports = matrix[:, :3].sum(0).unbind(), _staged_reports(form, matrix)
        kind = form.kind
    else:
        numerator, weight, _, reports = _sums(micros, local_sums(micros), world, without="loss")
        kind = micros[0].kind
    device = numerator.device
    if kind == "share":
        numerator = numerator.double() * weight
    return {
        key: (as_scalar(top, torch.float64, device), as_scalar(bottom, torch.float64, device))
        for key, (top, bottom) in {"loss": (numerator, weight), **reports}.items()
    }


def at_least_one(weight: Scalar) -> Scalar:
    """A weight to divide by: a step without any labels has a loss of zero, not NaN."""
    return weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)


def divisor(weight: Scalar, loss: Tensor) -> Scalar:
    """`at_least_one(weight)` in the loss's precision: dividing by the count itself gives float32 in any model."""
    least = at_least_one(weight)
    return least.to(torch.promote_types(loss.dtype, torch.float32)) if isinstance(least, Tensor) else least


def is_known(weight: Scalar, number: int) -> bool:
    """Whether the host knows that a weight equals this number."""
    return not isinstance(weight, Tensor) and weight == number


def local_sums(micros: list[MicroLoss]) -> LocalSums:
    """(numerator, weight, labels) of some micro-batches on this rank; labels are None if unknown."""
    losses = [_counted(micro) * micro.weight if micro.kind == "mean" else _counted(micro) for micro in micros]
    weight: Scalar = 0
    tokens: Scalar | None = 0
    for micro in micros:
        weight = weight + micro.weight
        tokens = None if tokens is None or micro.tokens is None else tokens + micro.tokens
    return sum(losses[1:], losses[0]), weight, tokens


def _counted(micro: MicroLoss) -> Tensor:
    """The loss of a micro-batch; 0 for a filler and for the mean over no labels, which is NaN."""
    loss, weight = micro.loss, micro.weight
    if loss.requires_grad:
        loss = loss.detach()
    if not isinstance(weight, Tensor):
        return torch.zeros_like(loss) if weight == 0 else loss
    return loss.masked_fill(weight == 0, 0.0) if micro.kind == "mean" else loss


def _local_report(micros: list[MicroLoss], key: str) -> tuple[Scalar, Scalar]:
    top: Scalar = 0
    bottom: Scalar = 0
    for micro in micros:
        if not isinstance(micro.report, Mapping):
            raise ConfigError(f"the report of a loss function must be {_REPORT}, got {described(micro.report)}")
        if key not in micro.report:
            raise ConfigError(f"{key!r} is reported for only some micro-batches of a step; report it for all of them.")
        value = micro.report[key]
        try:
            parts: Iterable[Scalar] = value if isinstance(value, tuple) else torch.as_tensor(value).flatten()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the report of a loss function must be {_REPORT}, got {described(value)} for {key!r}"
            ) from error
        pair = [part.detach() if isinstance(part, Tensor) else part for part in parts]
        if len(pair) not in (1, 2):
            shape = tuple(value.shape) if isinstance(value, Tensor) else (len(pair),)
            raise ConfigError(
                f"Invalid value shape: {shape} for key {key}; report a mean (1 element), or sum and count (2)."
            )
        if is_known(micro.weight, 0):
            top, bottom = top + pair[0] * 0, bottom + pair[-1] * 0
        elif len(pair) == 2:
            top, bottom = top + pair[0], bottom + pair[1]
        else:
            counted = pair[0] * micro.weight
            if isinstance(micro.weight, Tensor) and isinstance(counted, Tensor) and isinstance(pair[0], Tensor):
                counted = counted.masked_fill(micro.weight == 0, 0.0)  # the mean over nothing is NaN, and has no weight
            top, bottom = top + counted, bottom + micro.weight
    return top, bottom


def _sums(
    micros: list[MicroLoss], local: LocalSums, world: World, without: str = ""
) -> tuple[Tensor, Scalar, Scalar | None, dict[str, tuple[Scalar, Scalar]]]:
    """The local sums and those of each report over all ranks; in float64 if there are several. Collective."""
    numerator, weight, tokens = local
    keys = sorted({key for micro in micros for key in micro.report} - {without})
    reports = {key: _local_report(micros, key) for key in keys}
    if world.data.num_parts == 1:
        return numerator, weight, tokens, reports
    parts = [numerator, weight, -1.0 if tokens is None else tokens, *chain.from_iterable(reports.values())]
    # float64 keeps token counts exact; MPS has none, but no process group either
    vector = torch.stack([as_scalar(part, torch.float64, numerator.device) for part in parts])
    world.data.sum_losses(vector)
    pairs = zip(vector[3::2], vector[4::2], strict=True)
    return vector[0], vector[1], None if tokens is None else vector[2], dict(zip(keys, pairs, strict=True))


def _form_of(micros: list[MicroLoss], without: str) -> LossForm | None:
    if not micros:
        return None
    if len({micro.kind == "share" for micro in micros}) > 1:
        raise LossError(_MIXED)
    keys = sorted({key for micro in micros for key in micro.report} - {without})
    tokens = all(micro.tokens is not None for micro in micros)
    return LossForm(micros[0].kind, tokens, tuple(keys), local_sums(micros)[0].dtype)


def _staged_step(micros: list[MicroLoss], world: World, forms: LossForms) -> StepLoss:
    """The step's loss where only the last stage of a pipeline has losses. Collective over all ranks."""
    form, matrix = _staged_sums(micros, world, forms, "step")
    if form is None:
        raise LossError("no rank has a loss of this step; the forward step must return one on the last stage.")
    numerator, weight, tokens = matrix[:, :3].sum(0).unbind()
    top, bottom, labels = matrix[_part_of(world), :3].unbind()
    reports = {
        key: (above / at_least_one(below)).to(form.dtype)  # type: ignore[union-attr]
        for key, (above, below) in _staged_reports(form, matrix).items()
    }
    return StepLoss(
        numerator.to(form.dtype),
        1.0 if form.kind == "share" else weight,
        tokens if form.counts_tokens else None,
        reports,
        form.kind,
        own=(top.to(form.dtype), bottom, labels if form.counts_tokens else None),
    )


def _staged_reports(form: LossForm, matrix: Tensor) -> dict[str, tuple[Scalar, Scalar]]:
    totals = matrix[:, 3:].sum(0)
    return dict(zip(form.keys, zip(totals[::2], totals[1::2], strict=True), strict=True))


def _part_of(world: World) -> int:
    """Which of the ranks with different losses this rank's pipeline is."""
    return world.rank // world.sizes.tp % world.data.num_parts


def _staged_sums(
    micros: list[MicroLoss], world: World, forms: LossForms, of: str, without: str = ""
) -> tuple[LossForm | None, Tensor]:
    """The form of the losses, and a row of sums for each pipeline, in float64; the form is None if no rank has any.

    A row is numerator, weight, labels, and the pair of each report. Collective.
    """
    own = _form_of(micros, without)
    form = forms.known.get(of)
    if form is None:
        everywhere = world.gather(own)
        form = forms.known[of] = next((one for one in everywhere if one is not None), None)
        forms.source = next((rank for rank in world.part("pp") if everywhere[rank] is not None), forms.source)
    if form is None:
        return None, torch.zeros(0)
    if own is not None and own != form:
        raise LossError(
            f"the loss function reports {', '.join(own.keys) or 'nothing'} ({own.kind}), but before "
            f"{', '.join(form.keys) or 'nothing'} ({form.kind}): in a pipeline, the ranks without losses rely on it; "
            f"report the same in every step."
        )
    matrix = torch.zeros(world.data.num_parts, 3 + 2 * len(form.keys), dtype=torch.float64, device=world.device)
    if own is not None:
        numerator, weight, tokens = local_sums(micros)
        pairs = chain.from_iterable(_local_report(micros, key) for key in own.keys)
        row = [numerator, weight, 0 if tokens is None else tokens, *pairs]
        matrix[_part_of(world)] = torch.stack([as_scalar(one, torch.float64, world.device) for one in row])
    if world.data.num_parts == 1:
        return form, world.broadcast(matrix, forms.source, "losses", world.group("pp"))
    return form, world.reduce(matrix, dist.ReduceOp.SUM, "losses", world.group("pp", "dp_replicate", "dp_shard", "cp"))
