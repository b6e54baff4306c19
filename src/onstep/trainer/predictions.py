"""Defines the results of the Trainer's methods, under Hugging Face's names, and collects logits and labels for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onstep.data.loaders.iterable_loader import count_samples
from onstep.distributed import World
from onstep.errors import ConfigError, OnstepError, warn_once
from onstep.training.compute.batch_notes import contents

logger = logging.getLogger(__name__)


class TrainOutput(NamedTuple):
    """Result of `Trainer.train`."""

    global_step: int
    training_loss: float
    """Mean of the losses of all steps."""
    metrics: dict[str, Any]
    """The final metrics, and the mean loss as `train_loss`."""


class PredictionOutput(NamedTuple):
    """Result of `Trainer.predict`."""

    predictions: Any
    """Array, or tuple of arrays, with one row per sample in dataset order."""
    label_ids: Any
    metrics: dict[str, Any]


class EvalLoopOutput(NamedTuple):
    """Result of `Trainer.evaluation_loop`."""

    predictions: Any
    """Array, or tuple of arrays, with one row per sample in dataset order; a list of them by batch with
    `eval_do_concat_batches=False`; None if not kept."""
    label_ids: Any
    metrics: dict[str, Any]
    num_samples: int | None


@dataclass
class EvalPrediction:
    """The argument of `compute_metrics`.

    It unpacks to `(predictions, label_ids)`, followed by the inputs and losses that `include_for_metrics` requests.
    """

    predictions: Any
    label_ids: Any
    inputs: Any = None
    losses: Any = None

    def _parts(self) -> tuple[Any, ...]:
        wanted = tuple(part for part in (self.inputs, self.losses) if part is not None)
        return (self.predictions, self.label_ids, *wanted)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts())

    def __getitem__(self, index: int) -> Any:
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

    def add(self, inputs: Any, logits: Any, labels: Any, loss: Tensor | None, is_filler: bool) -> None:
        """Record a micro-batch; a filler only keeps its place."""
        if is_filler:
            self._rows.append(None)
            return
        kept = inputs.get(self.input_name) if self.input_name and isinstance(inputs, Mapping) else None
        losses = None if loss is None else np.full(count_samples(inputs) or 1, loss.item())
        self._rows.append(Collected(_to_numpy(logits), _to_numpy(labels), _to_numpy(kept), losses))

    def gather(self, world: World) -> Collected:
        """The data of the whole set, on every rank. Collective."""
        by_rank = world.gather(self._rows)
        batches = [[row for row in batch if row is not None] for batch in zip(*by_rank, strict=True)]
        if self.joins_batches and not self.joins_lists:
            rows = [row for batch in batches for row in batch]
        else:
            joined = (batch if len(batch) == 1 else [_joined(batch, joins_lists=self.joins_lists)] for batch in batches)
            rows = [row for (row,) in joined]
        if self.joins_batches:
            return _joined(rows) if rows else Collected()
        columns = (list(column) for column in zip(*rows, strict=True))
        return Collected(*(None if column[0] is None else column for column in columns))


class BatchMetrics:
    """Calls `compute_metrics` after every batch, and with `compute_result=True` after the last.

    It receives tensors on the device, with the samples of all ranks in dataset order.
    """

    def __init__(self, compute_metrics: Callable[..., Any], wanted: list[str], world: World) -> None:
        self._compute_metrics = compute_metrics
        self._wanted = wanted
        self._world = world
        self._last: EvalPrediction | None = None
        """The most recent batch: whether it is the last one is known when the next one comes."""

    def add(self, inputs: Any, logits: Any, labels: Any, loss: Tensor | None, is_filler: bool) -> None:
        """Add a micro-batch. Collective."""
        losses = None if loss is None else loss.detach().repeat(count_samples(inputs) or 1)
        row = Collected(logits, labels, inputs if "inputs" in self._wanted else None, losses)
        if self._world.size > 1:
            own = None if is_filler else Collected(*map(_to_numpy, row))
            rows = [one for one in self._world.gather(own) if one is not None]
            row = Collected(*(_to_tensors(part, self._world.device) for part in _joined(rows)))
        if row.predictions is None or row.label_ids is None:
            return
        self._compute(is_last=False)
        losses = row.losses if "loss" in self._wanted else None
        self._last = EvalPrediction(row.predictions, row.label_ids, row.inputs, losses)

    def result(self) -> dict[str, Any]:
        """The metrics of all batches."""
        return self._compute(is_last=True) or {}

    def _compute(self, *, is_last: bool) -> Any:
        batch, self._last = self._last, None
        return None if batch is None else call_named(self._compute_metrics, batch, compute_result=is_last)


def call_named(function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """`function(*values, **named)`, for a user's function of metrics, which a note on its errors names.

    Raises:
        ConfigError: in place of a `StopIteration`, which would pass for the end of what calls it.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        return function(*values, **named)
    except OnstepError:
        raise
    except StopIteration as error:
        raise ConfigError(
            f"the metric function {name} raised StopIteration: something in it called next() on an exhausted iterator."
        ) from error
    except Exception as error:
        given = values[0] if len(values) == 1 and isinstance(values[0], EvalPrediction) else values
        error.add_note(f"raised by the metric function {name}, called with {contents(tuple(given))}")
        raise


def logits_of(outputs: Any, ignore_keys: set[str], *, has_loss: bool) -> Any:
    """The predictions among a model's outputs: one, or a tuple of those that are not ignored."""
    values: tuple[Any, ...]
    if isinstance(outputs, Mapping):
        values = tuple(v for key, v in outputs.items() if key not in ignore_keys and v is not None)
    elif isinstance(outputs, (list, tuple)):
        starts_with_loss = has_loss and isinstance(outputs[0], Tensor) and outputs[0].ndim == 0
        values = tuple(outputs[1:] if starts_with_loss else outputs)
    else:
        return outputs
    return values[0] if len(values) == 1 else values


def prefixed(computed: dict[str, Any], prefix: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """A user's metrics under the prefix, as Python numbers; one that replaces a measured one is named."""
    start = f"{prefix}_"
    metrics = {key if key.startswith(start) else start + key: _plain(value) for key, value in computed.items()}
    replaced = sorted(measured.keys() & metrics.keys())
    if replaced:
        warn_once(logger, f"compute_metrics returns {', '.join(replaced)}, which replaces what was measured")
    return metrics


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def mean_of(loss: Any) -> Any:
    """The loss that a `prediction_step` returned, 0-d and detached; None if there is none."""
    if loss is None:
        return None
    values = torch.as_tensor(loss).detach()
    return values.to(torch.promote_types(values.dtype, torch.float32)).mean()


def _to_numpy(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _to_numpy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_to_numpy(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _to_tensors(value: Any, device: torch.device) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).to(device)
    if isinstance(value, dict):
        return {key: _to_tensors(part, device) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_to_tensors(part, device) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _joined(rows: list[Collected], *, joins_lists: bool = False) -> Collected:
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
