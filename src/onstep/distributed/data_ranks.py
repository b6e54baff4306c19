"""The ranks of a run that have different samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed.mesh import grid_of

T = TypeVar("T")
_DATA = ("dp_replicate", "dp_shard")
"""The axes along which samples differ."""


class Reduce(Protocol):
    """Reduces a tensor over the ranks along some axes, in place."""

    def __call__(
        self, tensor: Tensor, operation: dist.ReduceOp.RedOpType, name: str, axes: tuple[str, ...], /
    ) -> Tensor: ...


class DataRanks:
    """The ranks of a world with different samples; ranks that share theirs, as those of `tp` do, count as one.

    With data parallelism as the only axis these are all ranks, and the collectives are those of the world.

    Args:
        sizes: the number of ranks along each axis.
        rank: this rank among all ranks.
        reduce: `World.reduce`.
        gather: `World.gather`.
        gather_numbers: `World.gather_numbers`.
    """

    def __init__(
        self,
        sizes: ParallelSizes,
        rank: int,
        *,
        reduce: Reduce,
        gather: Callable[[Any], list[Any]],
        gather_numbers: Callable[[list[float]], list[list[float]]],
    ) -> None:
        self._grid, self._num_parts = grid_of(sizes), sizes.data * sizes.cp
        at = self._grid.coordinates(rank)
        self.rank: int = at["dp_replicate"] * sizes.dp_shard + at["dp_shard"]
        """The number of this rank's share of the samples, from 0."""
        self.size: int = sizes.data
        """The number of ranks with different samples."""
        self._reduce, self._gather, self._gather_numbers = reduce, gather, gather_numbers

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks with different samples, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        return self._reduce(tensor, dist.ReduceOp.SUM, "data.sum", _DATA) if self.size > 1 else tensor

    def sum_losses(self, tensor: Tensor) -> Tensor:
        """Like `sum`, but also over the ranks of `cp`, each of which has the losses of a part of every sequence.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        if self._num_parts == 1:
            return tensor
        return self._reduce(tensor, dist.ReduceOp.SUM, "data.sum_losses", (*_DATA, "cp"))

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over the ranks with different samples, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        return self._reduce(tensor, dist.ReduceOp.MAX, "data.max", _DATA) if self.size > 1 else tensor

    def gather(self, item: Any) -> list[Any]:
        """One item for each share of the samples, in their order, on every rank. Collective over all ranks.

        Of ranks with the same samples, the item of the first one counts.

        Args:
            item: a picklable object of this rank.
        """
        return self._one_of_each(self._gather(item))

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Numbers for each share of the samples, in their order, on every rank. Collective over all ranks, on the CPU.

        Args:
            numbers: as many numbers on each rank.
        """
        return self._one_of_each(self._gather_numbers(numbers))

    def _one_of_each(self, items: list[T]) -> list[T]:
        if self.size == len(items):
            return items
        places = [self._grid.coordinates(rank) for rank in range(len(items))]
        return [item for item, at in zip(items, places, strict=True) if not (at["pp"] or at["cp"] or at["tp"])]
