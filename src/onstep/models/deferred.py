"""Tensors whose values are computed when they are asked for, so that a model is written without being in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onstep.distributed.shards import as_dtensor, whole


class DeferredTensor(Tensor):
    """A tensor without values: `value_of` computes them, each time again. What follows from it is deferred too.

    It is made by `deferred`. An operation that would change it, or that needs its values, is refused by torch.
    """

    compute: Callable[[], Tensor]
    """Gives the values, on the CPU."""

    @staticmethod
    def __new__(cls, outline: Tensor, compute: Callable[[], Tensor]) -> DeferredTensor:
        """`outline` is a tensor on the meta device."""
        made = Tensor._make_wrapper_subclass(
            cls, outline.shape, strides=outline.stride(), dtype=outline.dtype, device=torch.device("cpu")
        )
        made.compute = compute
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Without the values."""
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Defer an operation of torch."""
        if func._schema.is_mutable:
            raise TypeError(f"{func} would change a tensor whose values are not here yet; take value_of(tensor) first")
        on_cpu = {name: value for name, value in (kwargs or {}).items() if name not in ("device", "pin_memory")}
        outlines = func(*tree_map(_outline, args), **tree_map(_outline, on_cpu))

        def compute() -> Any:
            return func(*tree_map(_value, args), **tree_map(_value, on_cpu))

        if isinstance(outlines, Tensor):
            return cls(outlines, compute)
        return type(outlines)(cls(one, partial(_item, compute, place)) for place, one in enumerate(outlines))


def deferred(shape: Sequence[int], dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
    """A tensor whose values `compute` returns on the CPU when they are asked for.

    Args:
        shape: its shape.
        dtype: its type.
        compute: is called whenever the values are needed.
    """
    return DeferredTensor(torch.empty(tuple(shape), dtype=dtype, device="meta"), compute)


def gathered(tensor: Tensor) -> Tensor:
    """`tensor` if it is a plain one, and a deferred one for a DTensor, whose `value_of` is then collective."""
    part = as_dtensor(tensor)
    return tensor if part is None else deferred(part.shape, part.dtype, lambda: whole(tensor.detach()).cpu())


def applied(function: Callable[[Tensor], Tensor], tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`function(tensor)`, deferred if the tensor is; for a function that torch does not see through.

    Args:
        function: computes the result from values.
        tensor: the tensor.
        shape: of the result.
        dtype: of the result.
    """
    if not isinstance(tensor, DeferredTensor):
        return function(tensor)
    return deferred(shape, dtype, lambda: function(value_of(tensor)))


def value_of(tensor: Tensor) -> Tensor:
    """A tensor's values: of a deferred one they are computed, others are returned as they are."""
    return tensor.compute().detach() if isinstance(tensor, DeferredTensor) else tensor


def _item(compute: Callable[[], Any], place: int) -> Tensor:
    item: Tensor = compute()[place]
    return item


def _outline(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _value(value: Any) -> Any:
    return value_of(value) if isinstance(value, Tensor) else value
