"""Defines the results of the Trainer's methods, under Hugging Face's names, and collects logits and labels for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from onstep.config.hf.arguments import TrainingArguments
from onstep.data import Batch
from onstep.data.loaders.iterable_loader import count_samples
from onstep.distributed import World
from onstep.record.kinds import Metrics

logger = logging.getLogger(__name__)

Arrays: TypeAlias = "NDArray[Any] | Tensor | list[Arrays] | tuple[Arrays, ...] | dict[str, Arrays] | None"
"""Predictions of a model, or their labels: arrays, or tensors with `batch_eval_metrics`, nested like its outputs."""


class TrainOutput(NamedTuple):
    """Result of `Trainer.train`."""

    global_step: int
    """Steps done."""
    training_loss: float
    """Mean of the losses of all steps."""
    metrics: Metrics
    """The final metrics, and the mean loss as `train_loss`."""


class PredictionOutput(NamedTuple):
    """Result of `Trainer.predict`."""

    predictions: Arrays
    """Array, or tuple of arrays, with one row per sample in dataset order."""
    label_ids: Arrays
    """The labels of all samples, in order; None if there are none."""
    metrics: Metrics
    """The metrics by name, with their prefix."""


class EvalLoopOutput(NamedTuple):
    """Result of `Trainer.evaluation_loop`."""

    predictions: Arrays
    """Array, or tuple of arrays, with one row per sample in dataset order; a list of them by batch with
    `eval_do_concat_batches=False`; None if not kept."""
    label_ids: Arrays
    """The labels of all samples, in order; None if there are none."""
    metrics: Metrics
    """The metrics by name, with their prefix."""
    num_samples: int | None
    """The number of samples."""


@dataclass
class EvalPrediction:
    """The argument of `compute_metrics`.

    It unpacks to `(predictions, label_ids)`, followed by the inputs and losses that `include_for_metrics` requests.
    """

    predictions: Arrays
    """The outputs of the model for all samples, (samples, ...), or a tuple of them."""
    label_ids: Arrays
    """The labels of all samples, in order; None if there are none."""
    inputs: Arrays = None
    """The inputs of all samples, if `args.include_for_metrics` names them."""
    losses: Arrays = None
    """The losses of the batches, if `args.include_for_metrics` names them."""

    def _parts(self) -> tuple[Arrays, ...]:
        wanted = tuple(part for part in (self.inputs, self.losses) if part is not None)
        return (self.predictions, self.label_ids, *wanted)

    def __iter__(self) -> Iterator[Arrays]:
        return iter(self._parts())

    def __getitem__(self, index: int) -> Arrays:
        return self._parts()[index]


class Collected(NamedTuple):
    """The data of an evaluation, as arrays with one row per sample in dataset order; None if not kept."""

    predictions: Any = None
    label_ids: Any = None
    inputs: Any = None
    losses: Any = None
    """The loss of the sample's micro-batch."""


@dataclass
class PredictionCollector:
    """Moves each micro-batch's outputs off the device and restores the dataset order of all ranks' rows."""

    input_name: str | None = None
    """The input to keep; None keeps none."""
    joins_batches: bool = True
    """Whether batches are joined to one array; otherwise there is a list with an item for each."""
    joins_lists: bool = False
    """Whether a list, as of one object for each sample, is continued by the next rank's, instead of item by item."""
    _rows: list[Collected | None] = field(default_factory=list)

    def add(self, inputs: Batch, logits: object, labels: object, loss: Tensor | None, is_filler: bool) -> None:
        """Record a micro-batch; a filler only keeps its place."""
        if is_filler:
            self._rows.append(None)
            return
        kept = inputs.get(self.input_name) if self.input_name and isinstance(inputs, Mapping) else None
        losses = None if loss is None else np.full(count_samples(inputs) or 1, loss.item())
        self._rows.append(Collected(to_numpy(logits), to_numpy(labels), to_numpy(kept), losses))

    def gather(self, world: World) -> Collected:
        """The data of the whole set, on every rank. Collective."""
        by_rank = _of_data_ranks(self._rows, world)
        batches = [[row for row in batch if row is not None] for batch in zip(*by_rank, strict=True)]
        if self.joins_batches and not self.joins_lists:
            rows = [row for batch in batches for row in batch]
        else:
            joined = (
                batch if len(batch) == 1 else [join_rows(batch, joins_lists=self.joins_lists)] for batch in batches
            )
            rows = [row for (row,) in joined]
        if self.joins_batches:
            return join_rows(rows) if rows else Collected()
        columns = (list(column) for column in zip(*rows, strict=True))
        return Collected(*(None if column[0] is None else column for column in columns))


def _of_data_ranks(rows: list[Collected | None], world: World) -> list[list[Collected | None]]:
    """The rows of each share of the samples, which in a pipeline the last stage has. Collective."""
    if world.sizes.pp == 1:
        return world.data.gather(rows)
    found: list[list[Collected | None]] = [[] for _ in range(world.data.size)]
    for rank, of_rank in enumerate(world.gather(rows)):
        found[world.sizes.data_rank(rank)] = of_rank or found[world.sizes.data_rank(rank)]
    return found


def collector_for(args: TrainingArguments, module: nn.Module, *, is_test: bool) -> PredictionCollector | None:
    """The collector of an evaluation; None if its metrics are computed batch by batch."""
    if args.batch_eval_metrics and not is_test:
        return None
    keeps_inputs = "inputs" in args.include_for_metrics
    return PredictionCollector(
        getattr(module, "main_input_name", "input_ids") if keeps_inputs else None,
        joins_batches=args.eval_do_concat_batches,
        joins_lists=args.eval_use_gather_object,
    )


def logits_of(outputs: object, ignore_keys: set[str], *, has_loss: bool) -> object:
    """The predictions among a model's outputs: one, or a tuple of those that are not ignored."""
    values: tuple[object, ...]
    if isinstance(outputs, Mapping):
        values = tuple(v for key, v in outputs.items() if key not in ignore_keys and v is not None)
    elif isinstance(outputs, (list, tuple)):
        starts_with_loss = has_loss and isinstance(outputs[0], Tensor) and outputs[0].ndim == 0
        values = tuple(outputs[1:] if starts_with_loss else outputs)
    else:
        return outputs
    return values[0] if len(values) == 1 else values


def mean_of(loss: object) -> Tensor | None:
    """The loss that a `prediction_step` returned, 0-d and detached; None if there is none."""
    if loss is None:
        return None
    values = torch.as_tensor(loss).detach()
    return values.to(torch.promote_types(values.dtype, torch.float32)).mean()


def to_numpy(value: object) -> object:
    """Tensors, in any nesting, as arrays in host memory."""
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, Mapping):
        return {key: to_numpy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [to_numpy(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def to_tensors(value: object, device: torch.device) -> object:
    """Arrays, in any nesting, as tensors on the device."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).to(device)
    if isinstance(value, dict):
        return {key: to_tensors(part, device) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [to_tensors(part, device) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def join_rows(rows: list[Collected], *, joins_lists: bool = False) -> Collected:
    """Micro-batches as one."""
    return Collected(*(concatenate(list(column), joins_lists=joins_lists) for column in zip(*rows, strict=True)))


def concatenate(rows: list[Any], pad: int = -100, *, joins_lists: bool = False) -> Any:
    """Join arrays, or tuples, lists or dicts of arrays, along the first axis; the second is padded if lengths differ.

    Args:
        joins_lists: continue a list by the next one, instead of joining them item by item.
    """
    first = rows[0]
    if first is None:
        return None
    if isinstance(first, list) and joins_lists:
        return [item for row in rows for item in row]
    if isinstance(first, (list, tuple)):
        parts = [concatenate([row[i] for row in rows], pad) for i in range(len(first))]
        return parts if isinstance(first, list) else tuple(parts)
    if isinstance(first, dict):
        return {key: concatenate([row[key] for row in rows], pad) for key in first}
    arrays = [np.atleast_1d(np.asarray(row)) for row in rows]
    if arrays[0].ndim < 2 or len({array.shape[1] for array in arrays}) == 1:
        return np.concatenate(arrays)
    width = max(array.shape[1] for array in arrays)
    spreads = [[(0, 0), (0, width - array.shape[1]), *[(0, 0)] * (array.ndim - 2)] for array in arrays]
    return np.concatenate([np.pad(a, spread, constant_values=pad) for a, spread in zip(arrays, spreads, strict=True)])
