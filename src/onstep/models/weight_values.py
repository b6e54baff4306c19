"""Says what is left to give a model whose parameters have no values yet: one tensor at a time, or a part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Slices = tuple[slice, ...]
"""A part of a tensor, one slice for each dimension."""


@dataclass(frozen=True)
class Value:
    """The value of a parameter or buffer, of which each rank reads its part."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    read: Callable[[Slices], Tensor]
    """The part in these slices; what it shares memory with may change afterwards."""


def value_of(tensor: Tensor) -> Value:
    """The value of a tensor that is in memory."""
    return Value(tuple(tensor.shape), lambda part: tensor[part])


Give = Callable[[str, Value], None]
"""Accepts the value of the parameter or buffer of a name, before the next one exists."""

GiveAll = Callable[[Give], None]
"""Gives the values of all parameters of a model, and of its buffers that have any, in an order that ranks share."""
