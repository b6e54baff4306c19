"""Gathers, pads and reduces tensors of all ranks, in any nesting of mappings, lists and tuples, as accelerate does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.data.loaders.collate import mapping_like
from onstep.distributed import World

Data = TypeVar("Data")
"""Tensors in any nesting."""


def mapped(function: Callable[[Tensor], object], data: object) -> Any:
    """`data` with every tensor replaced by the function's result.

    Raises:
        TypeError: for anything that is not a tensor.
    """
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return mapping_like(data, {key: mapped(function, value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(mapped(function, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(mapped(function, value) for value in data)
    raise TypeError(f"only tensors can be gathered, padded and reduced, got {type(data).__name__}; convert it first.")


def gather(data: Data, world: World) -> Data:
    """The tensors of the same shape of all shares of the samples, joined along the first axis. Collective."""
    if world.data.size == 1:
        return data
    joined: Data = mapped(lambda tensor: torch.cat(_all(_with_rows(tensor), world)), data)
    return joined


def gather_rows(data: object, world: World, *, is_filler: bool, as_objects: bool = False) -> object:
    """The rows of all shares of the samples, any number of them; none of a filler; objects as one list. Collective."""
    if world.data.size == 1:
        return data
    if as_objects or not _has_only_tensors(data):
        return [one for share in world.data.gather([] if is_filler else data) for one in share]

    def joined(tensor: Tensor) -> Tensor:
        rows = _with_rows(tensor)
        counts = [row[0] for row in world.data.gather_numbers([0 if is_filler else rows.shape[0], rows.shape[0]])]
        padded = pad_to_longest(rows, world)
        return torch.cat([part[: int(count)] for part, count in zip(_all(padded, world), counts, strict=True)])

    return mapped(joined, data)


def reduce(data: Data, world: World, reduction: str = "sum") -> Data:
    """The `sum` or `mean` over the ranks with samples of their own, in new tensors. Collective."""

    def reduced(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        if world.data.size == 1:
            return total
        if reduction == "max":
            return world.data.max(total)
        world.data.sum(total)
        return total.div_(world.data.size) if reduction == "mean" else total

    moved: Data = mapped(reduced, data)
    return moved


def pad_to_longest(data: Data, world: World, *, dim: int = 0, value: float = 0, first: bool = False) -> Data:
    """Tensors padded with `value` along an axis to the longest of all ranks, behind or in front. Collective."""

    def padded(tensor: Tensor) -> Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        axis = dim % tensor.ndim
        length = int(max(row[axis] for row in world.data.gather_numbers([float(size) for size in tensor.shape])))
        missing = length - tensor.shape[axis]
        if missing == 0:
            return tensor
        shape = [missing if one == axis else size for one, size in enumerate(tensor.shape)]
        filling = tensor.new_full(shape, value)
        return torch.cat([filling, tensor] if first else [tensor, filling], dim=axis)

    moved: Data = mapped(padded, data)
    return moved


def _all(tensor: Tensor, world: World) -> list[Tensor]:
    mine = tensor.contiguous()
    parts = [torch.empty_like(mine) for _ in range(world.data.size)]
    dist.all_gather(parts, mine, group=world.data.group())
    return parts


def _with_rows(tensor: Tensor) -> Tensor:
    """A number as a vector of one."""
    return tensor.clone()[None] if tensor.ndim == 0 else tensor


def _has_only_tensors(data: object) -> bool:
    if isinstance(data, Mapping):
        return all(_has_only_tensors(value) for value in data.values())
    if isinstance(data, (list, tuple)):
        return all(_has_only_tensors(value) for value in data)
    return isinstance(data, Tensor)
