"""Divides a micro-batch into its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

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
