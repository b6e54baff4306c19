"""Defines the results of the Trainer's methods, under Hugging Face's names, and collects logits and labels for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onstep.data.loaders.iterable_loader import count_samples
from onstep.distributed import World
from onstep.trainer.loss_convention import Labels


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


class PredictionCollector:
    """Moves each micro-batch's outputs off the device and restores the dataset order of all ranks' rows.

    Args:
        labels: locates the labels.
        ignore_keys: outputs that are not predictions.
        preprocess_logits: called with logits and labels on the device, before anything is kept.
        input_name: the input to keep; None keeps none.
        is_test: whether the set may have no labels.
    """

    def __init__(
        self,
        labels: Labels,
        ignore_keys: list[str],
        preprocess_logits: Callable[[Any, Any], Any] | None = None,
        input_name: str | None = None,
        is_test: bool = False,
    ) -> None:
        self.is_test = is_test
        self._labels = labels
        self._ignore_keys = {*ignore_keys, "loss"}
        self._preprocess_logits = preprocess_logits
        self._input_name = input_name
        self._rows: list[Collected | None] = []

    def add(self, inputs: Any, outputs: Any, loss: Tensor | None, is_filler: bool) -> None:
        """Record a micro-batch; a filler only keeps its place."""
        if is_filler:
            self._rows.append(None)
            return
        labels = self._labels.of(inputs)
        logits = self._logits(outputs, has_loss=loss is not None)
        if self._preprocess_logits is not None:
            logits = self._preprocess_logits(logits, labels)
        kept = inputs.get(self._input_name) if self._input_name and isinstance(inputs, Mapping) else None
        losses = None if loss is None else np.full(count_samples(inputs) or 1, loss.item())
        self._rows.append(Collected(_to_numpy(logits), _to_numpy(labels), _to_numpy(kept), losses))

    def gather(self, world: World) -> Collected:
        """The data of the whole set, on every rank. Collective."""
        by_rank = world.gather(self._rows)
        rows = [row for same_place in zip(*by_rank, strict=True) for row in same_place if row is not None]
        return Collected(*(concatenate(list(column)) for column in zip(*rows, strict=True)))

    def _logits(self, outputs: Any, *, has_loss: bool) -> Any:
        values: tuple[Any, ...]
        if isinstance(outputs, Mapping):
            values = tuple(v for key, v in outputs.items() if key not in self._ignore_keys and v is not None)
        elif isinstance(outputs, (list, tuple)):
            starts_with_loss = has_loss and isinstance(outputs[0], Tensor) and outputs[0].ndim == 0
            values = tuple(outputs[1:] if starts_with_loss else outputs)
        else:
            return outputs
        return values[0] if len(values) == 1 else values


def _to_numpy(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _to_numpy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_to_numpy(part) for part in value)
    return value


def concatenate(rows: list[Any], pad: int = -100) -> Any:
    """Join arrays, or tuples or dicts of arrays, along the first axis; the second is padded if lengths differ."""
    first = rows[0]
    if first is None:
        return None
    if isinstance(first, tuple):
        return tuple(concatenate([row[i] for row in rows], pad) for i in range(len(first)))
    if isinstance(first, dict):
        return {key: concatenate([row[key] for row in rows], pad) for key in first}
    arrays = [np.atleast_1d(np.asarray(row)) for row in rows]
    if arrays[0].ndim < 2 or len({array.shape[1] for array in arrays}) == 1:
        return np.concatenate(arrays)
    width = max(array.shape[1] for array in arrays)
    spreads = [[(0, 0), (0, width - array.shape[1]), *[(0, 0)] * (array.ndim - 2)] for array in arrays]
    return np.concatenate([np.pad(a, spread, constant_values=pad) for a, spread in zip(arrays, spreads, strict=True)])
