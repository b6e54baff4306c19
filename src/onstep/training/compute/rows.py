"""Divides a micro-batch into its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from onstep.data import Batch
from onstep.data.loaders.collate import mapping_like
from onstep.data.loaders.iterable_loader import count_samples


def rows_of(batch: Batch) -> list[Batch]:
    """A micro-batch as batches of one sample each; the whole one if it cannot be divided."""
    count = count_samples(batch)
    if count is None or count < 2:
        return [batch]
    return [chosen_rows(batch, range(number, number + 1), count) for number in range(count)]


def chosen_rows(value: Any, rows: Sequence[int], count: int) -> Any:
    """Some of the samples of a micro-batch of `count`, which need not be a mapping of tensors."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value[_index(rows)] if value.ndim and value.shape[0] == count else value
    if isinstance(value, Mapping):
        parts = {key: chosen_rows(one, rows, count) for key, one in value.items() if key != "num_tokens"}
        return mapping_like(value, parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(chosen_rows(one, rows, count) for one in value))
    if isinstance(value, (list, tuple)):
        is_of_samples = len(value) == count and not any(isinstance(one, (Tensor, np.ndarray)) for one in value)
        return type(value)(
            [value[row] for row in rows] if is_of_samples else (chosen_rows(one, rows, count) for one in value)
        )
    return value


def _index(rows: Sequence[int]) -> slice | list[int]:
    return slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)


def batch_norms(model: list[nn.Module]) -> list[nn.Module]:
    """The batch norms that are training and have running statistics."""
    modules = [module for chunk in model for module in chunk.modules()]
    return [one for one in modules if isinstance(one, _BatchNorm) and one.training and one.track_running_stats]


@contextmanager
def normalised_alone(model: list[nn.Module]) -> Iterator[None]:
    """While entered, batch norms use their running statistics: a sample alone has none of a batch.

    A forward step that calls `model.train()` does not change that.
    """
    norms = batch_norms(model)
    for one in norms:
        one.training = False
        vars(one)["train"] = partial(_unchanged, one)
    try:
        yield
    finally:
        for one in norms:
            one.training = True
            del vars(one)["train"]


def _unchanged(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
