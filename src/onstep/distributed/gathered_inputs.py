"""Multiplies gathered activations by weights, and keeps of them only this rank's part for the gradients of the weights.

The backward pass gathers the whole again, once for all products of an input, so that what sequence-parallel ranks keep
is divided by their number.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198),
section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_NAME = "_gathered_input"
"""The attribute of a whole activation that knows the part that it was gathered from."""


def with_part(whole: Tensor, part: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """The same activation; what multiplies it by weights with `product` keeps its part instead.

    Args:
        whole: the activation, of which ranks compute the same.
        part: this rank's part of it.
        gather: makes the whole of the parts. Collective.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        setattr(whole, _NAME, _GatheredInput(part.detach(), gather))
    return whole


def as_whole(other: Tensor, whole: Tensor) -> Tensor:
    """`other`, with the part that `whole` has.

    Args:
        other: an activation of the same values.
        whole: one of `with_part`, or any.
    """
    if (known := _known(whole)) is not None:
        setattr(other, _NAME, known)
    return other


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear(x, weight, bias)`. Collective in the backward pass if `x` was gathered.

    Args:
        x: (..., inputs).
        weight: (outputs, inputs).
        bias: (outputs,).
    """
    known = _known(x)
    if known is None or not weight.requires_grad or not torch.is_grad_enabled():
        return linear(x, weight, bias)
    # apart from each other, so that schedules of pipelines can compute gradients of inputs before those of weights
    out = linear(x, weight.detach(), None if bias is None else bias.detach())
    of_weights = _OfWeights.apply(weight, bias, known.part_as(out.dtype), known.again, out.shape)  # type: ignore[no-untyped-call]
    found: Tensor = _Joined.apply(out, of_weights)  # type: ignore[no-untyped-call]
    return found


class _GatheredInput:
    """A part of an activation, for the products of the whole."""

    def __init__(self, part: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self.again = _Again(gather)
        self._parts = {part.dtype: part}
        self._part = part

    def part_as(self, dtype: torch.dtype) -> Tensor:
        """The part in the type of a product, one for all products of that type."""
        if dtype not in self._parts:
            self._parts[dtype] = self._part.to(dtype)
        return self._parts[dtype]


def _known(x: Tensor) -> _GatheredInput | None:
    """The part of an activation; none in what torch compiles, which cannot trace a state of backward passes."""
    return None if torch.compiler.is_compiling() else getattr(x, _NAME, None)


class _Again:
    """Gathers an activation for the first product that asks, and gives it up after the last one."""

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        self._gather = gather
        self._whole: Tensor | None = None
        self.num_products = self._num_asked = 0

    def whole(self, part: Tensor) -> Tensor:
        whole = self._whole
        if whole is None or whole.dtype != part.dtype:
            whole = self._whole = self._gather(part)
        self._num_asked += 1
        if self._num_asked % self.num_products == 0:
            self._whole = None
        return whole


class _OfWeights(torch.autograd.Function):
    """Zeros in place of a product, which has no memory, with the gradients of its weights."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, part: Tensor, again: _Again, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(part)
        ctx.again, ctx.dtypes = again, (weight.dtype, None if bias is None else bias.dtype)
        again.num_products += 1
        return part.new_zeros(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (part,) = ctx.saved_tensors
        rows, (of_weight, of_bias) = gradient.flatten(0, -2), ctx.dtypes
        x = ctx.again.whole(part).flatten(0, -2)
        bias = rows.sum(0).to(of_bias) if ctx.needs_input_grad[1] else None
        return (rows.t() @ x).to(of_weight), bias, None, None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, of_weights: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient
