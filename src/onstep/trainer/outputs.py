"""What the Trainer's methods give back, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


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
    """Array, or tuple of arrays, one row a sample in the order of the dataset."""
    label_ids: Any
    metrics: dict[str, Any]


@dataclass
class EvalPrediction:
    """What `compute_metrics` is called with.

    It unpacks to `(predictions, label_ids)`, followed by the inputs and losses that `include_for_metrics` asks for.
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


def concatenate(rows: list[Any], pad: int = -100) -> Any:
    """Join arrays, or tuples or dicts of arrays, along the first axis; the second is padded where lengths differ."""
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
    return np.concatenate([_padded(array, width, pad) for array in arrays])


def _padded(array: Any, width: int, pad: int) -> Any:
    spread = [(0, 0)] * array.ndim
    spread[1] = (0, width - array.shape[1])
    return np.pad(array, spread, constant_values=pad)
