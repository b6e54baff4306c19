"""Moves activations between tensor-parallel ranks, with the gradients that belong to each movement.

An activation is either the same on all ranks, and then so is its gradient, or one of parts: summands, positions of the
sequence, or columns. Each function here leads from one to the other; torch's autograd leads back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from onstep.distributed.buckets import ALL_GATHER, REDUCE_SCATTER
from onstep.errors import ConfigError


def check_divisible(length: int, ranks: int) -> None:
    """Refuse (ConfigError) sequences whose positions cannot be divided between the ranks.

    Args:
        length: the number of positions.
        ranks: the number of ranks.
    """
    if length % ranks:
        raise ConfigError(
            f"parallel.sequence_parallel=true divides sequences between {ranks} ranks, but those of this batch have "
            f"{length} positions; pad them to {length + -length % ranks}, or set it to false."
        )


def copied(x: Tensor, group: ProcessGroup) -> Tensor:
    """`x` for a computation of which each rank does a part; its gradient is the sum of those of all ranks.

    Args:
        x: the same on all ranks.
        group: the ranks.
    """
    found: Tensor = _Copied.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks, on all of them. Collective.

    Args:
        x: a summand of the same shape on each rank.
        group: the ranks.
    """
    found: Tensor = _Summed.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def counted_once(x: Tensor, group: ProcessGroup) -> Tensor:
    """`x` for a computation that each rank does as a whole, where gradients are summed: only the first rank has one.

    Args:
        x: the same on all ranks, and so is the gradient that comes back.
        group: the ranks.
    """
    found: Tensor = _CountedOnce.apply(x, group)  # type: ignore[no-untyped-call]
    return found


def gathered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks, for a computation of which each does a part: gradients are summed. Collective.

    Args:
        x: a part of the same shape on each rank.
        dim: the dimension along which the parts lie, in rank order.
        group: the ranks.
    """
    found: Tensor = _Gathered.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return found


def scattered(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum over the ranks. Collective.

    Args:
        x: a summand of the same shape on each rank.
        dim: the dimension that is divided, which the number of ranks must divide.
        group: the ranks.
    """
    found: Tensor = _Scattered.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return found


def own_part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part of what is the same on all ranks; its gradient is gathered, by a collective.

    Args:
        x: the same on all ranks.
        dim: the dimension that is divided, which the number of ranks must divide.
        group: the ranks.
    """
    found: Tensor = _OwnPart.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return found


def joined(x: Tensor, dim: int, group: ProcessGroup, length: int | None = None) -> Tensor:
    """The parts of all ranks, for a computation that each does as a whole; its gradient is their part. Collective.

    Args:
        x: a part, of the same shape on each rank unless there is a `length`.
        dim: the dimension along which the parts lie, in rank order.
        group: the ranks.
        length: the size of the whole along `dim`, of which each rank has `ceil(length / ranks)`, the last ones what is
            left.
    """
    if length is not None:
        size = -(-length // group.size())
        if x.shape[dim] < size:
            filler = list(x.shape)
            filler[dim] = size - x.shape[dim]
            x = torch.cat([x, x.new_zeros(filler)], dim)
    found: Tensor = _Joined.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return found if length is None else found.narrow(dim, 0, length)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    getattr(dist, ALL_GATHER)(parts, x.contiguous(), group=group)
    return parts if dim == 0 else torch.cat(parts.chunk(group.size()), dim)


def _scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    parts = torch.cat(x.chunk(group.size(), dim)) if dim else x.contiguous()
    own = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    getattr(dist, REDUCE_SCATTER)(own, parts, group=group)
    return own


def _own(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _CountedOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.is_first = group.rank() == 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return gradient if ctx.is_first else None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(gradient, ctx.dim, ctx.group), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.dim, ctx.group), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _own(x, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.dim, ctx.group), None, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own(gradient, ctx.dim, ctx.group).contiguous(), None, None
