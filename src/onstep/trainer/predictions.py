"""Collects logits and labels while a set is evaluated, for `compute_metrics` and `predict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onstep.distributed import World
from onstep.trainer.labels import Labels
from onstep.trainer.outputs import concatenate
from onstep.training.losses import count_samples


class Collected(NamedTuple):
    """What an evaluation saw, as arrays with one row a sample, in the order of the dataset; None where not kept."""

    predictions: Any = None
    label_ids: Any = None
    inputs: Any = None
    losses: Any = None
    """The loss of the sample's micro-batch."""


class PredictionCollector:
    """Takes each micro-batch's outputs off the device and puts all ranks' rows back into the order of the dataset.

    Args:
        labels: where the labels are.
        ignore_keys: outputs that are no predictions.
        preprocess_logits: called with logits and labels on the device, before anything is kept.
        input_name: the input to keep; None keeps none.
        is_test: a set that may have no labels.
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
        """Take up a micro-batch; a filler only holds its place."""
        if is_filler:
            self._rows.append(None)
            return
        labels = self._labels.of(inputs)
        logits = self._logits(outputs, has_loss=loss is not None)
        if self._preprocess_logits is not None:
            logits = self._preprocess_logits(logits, labels)
        kept = inputs.get(self._input_name) if self._input_name and isinstance(inputs, Mapping) else None
        losses = None if loss is None else np.full(count_samples(inputs), loss.item())
        self._rows.append(Collected(_to_numpy(logits), _to_numpy(labels), _to_numpy(kept), losses))

    def gather(self, world: World) -> Collected:
        """Everything of the whole set, on every rank. Collective."""
        by_rank = world.gather(self._rows)
        rows = [row for same_place in zip(*by_rank, strict=True) for row in same_place if row is not None]
        return Collected(*(concatenate(list(column)) for column in zip(*rows, strict=True)))

    def _logits(self, outputs: Any, *, has_loss: bool) -> Any:
        values: tuple[Any, ...]
        if isinstance(outputs, Mapping):
            values = tuple(v for key, v in outputs.items() if key not in self._ignore_keys and v is not None)
        elif isinstance(outputs, (list, tuple)):
            values = tuple(outputs[1:] if has_loss and _is_loss(outputs[0]) else outputs)
        else:
            return outputs
        return values[0] if len(values) == 1 else values


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _to_numpy(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _to_numpy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_to_numpy(part) for part in value)
    return value
