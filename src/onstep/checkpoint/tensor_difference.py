"""By how much two tensors differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ITEMS = 2**22
"""Elements compared at a time, in float64."""


@dataclass(frozen=True)
class TensorDifference:
    """One tensor of two checkpoints, A and B; where it is in one only, what concerns the other is None."""

    state: str
    """The component, with the rank or group where there are several: `model`, `rng/rank_0`."""
    name: str
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    is_equal: bool
    """The same dtype, shape and bits."""
    norms: tuple[float | None, float | None]
    """Euclidean, over all elements."""
    largest: float | None = None
    """The largest |a - b|; NaN where one is NaN and the other is not. None for tensors of different shapes."""
    relative: float | None = None
    """The norm of a - b over the larger norm of the two: 0 is equal, 1 as far away as from zero."""


def compare_tensors(state: str, name: str, a: Tensor | None, b: Tensor | None) -> TensorDifference:
    """Compare two CPU tensors; None is one that is not there."""
    shapes = (None if a is None else tuple(a.shape), None if b is None else tuple(b.shape))
    dtypes = (None if a is None else a.dtype, None if b is None else b.dtype)
    norm_a, norm_b = (None if one is None else _norm(one) for one in (a, b))
    largest = relative = None
    is_equal = False
    if a is not None and b is not None and shapes[0] == shapes[1]:
        is_equal = a.dtype == b.dtype and _same_bits(a, b)
        largest, distance = (0.0, 0.0) if is_equal else _distance(a, b)
        relative = _ratio(distance, norm_a or 0.0, norm_b or 0.0)
    return TensorDifference(state, name, dtypes, shapes, is_equal, (norm_a, norm_b), largest, relative)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _norm(tensor: Tensor) -> float:
    total = sum((float(_wide(part).abs().square().sum()) for part in _parts(tensor)), 0.0)
    return float(total**0.5)


def _distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest |a - b| and the norm of a - b; 0 where there are no elements."""
    largest = torch.zeros((), dtype=torch.float64)
    squares = torch.zeros((), dtype=torch.float64)
    for one, other in zip(_parts(a), _parts(b), strict=True):
        x, y = _wide(one), _wide(other)
        is_same = (x == y) | (x.isnan() & y.isnan())  # infinities too, whose difference would be NaN
        gaps = torch.where(is_same, 0.0, (x - y).abs())
        largest = torch.maximum(largest, gaps.max())
        squares += gaps.square().sum()
    return largest.item(), squares.sqrt().item()


def _ratio(distance: float, *norms: float) -> float:
    larger = max(norms)
    return distance / larger if larger > 0 else distance


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.reshape(-1), CHUNK_ITEMS) if tensor.numel() else ()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
