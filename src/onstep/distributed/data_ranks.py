"""The ranks of a run that have different samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed.mesh import grid_of

T = TypeVar("T")
_DATA = ("dp_replicate", "dp_shard")
"""The axes along which samples differ."""


class Reduce(Protocol):
    """Reduces a tensor over the ranks of a group, in place."""

    def __call__(
        self, tensor: Tensor, operation: dist.ReduceOp.RedOpType, name: str, group: ProcessGroup | None, /
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
        group: `World.group`.
    """

    def __init__(
        self,
        sizes: ParallelSizes,
        rank: int,
        *,
        reduce: Reduce,
        gather: Callable[[Any], list[Any]],
        gather_numbers: Callable[[list[float]], list[list[float]]],
        group: Callable[..., ProcessGroup],
    ) -> None:
        self._grid = grid_of(sizes)
        self.rank: int = sizes.data_rank(rank)
        """The number of this rank's share of the samples, from 0."""
        self.size: int = sizes.data
        """The number of ranks with different samples."""
        self.num_parts: int = sizes.data * sizes.cp
        """The number of ranks with different losses: along `cp`, each has those of a part of every sequence."""
        self._sizes, self._reduce, self._gather, self._gather_numbers = sizes, reduce, gather, gather_numbers
        self._group = group

    def group(self, *, with_parts: bool = False) -> ProcessGroup | None:
        """Their process group; None for the default group, which it is with data parallelism alone. Collective once.

        Args:
            with_parts: whether it is that of the `num_parts` ranks.
        """
        if (self.num_parts if with_parts else self.size) == self._sizes.ranks:
            return None
        return self._group(*_DATA, "cp") if with_parts else self._group(*_DATA)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks with different samples, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        return self._reduce(tensor, dist.ReduceOp.SUM, "data.sum", self.group()) if self.size > 1 else tensor

    def sum_losses(self, tensor: Tensor) -> Tensor:
        """The sum of losses or token counts over the `num_parts` ranks that have different ones, in place. Collective.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        if self.num_parts == 1:
            return tensor
        return self._reduce(tensor, dist.ReduceOp.SUM, "data.sum_losses", self.group(with_parts=True))

    def max(self, tensor: Tensor) -> Tensor:
        """The maximum over the ranks with different samples, in place. Collective, on the tensor's device.

        Args:
            tensor: a tensor of the same shape on each rank.
        """
        return self._reduce(tensor, dist.ReduceOp.MAX, "data.max", self.group()) if self.size > 1 else tensor

    def gather(self, item: Any) -> list[Any]:
        """One item for each share of the samples, in their order, on every rank. Collective over all ranks.

        Of ranks with the same samples, the item of the first one counts.

        Args:
            item: a picklable object of this rank.
        """
        return self.one_of_each(self._gather(item))

    def gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        """Numbers for each share of the samples, in their order, on every rank. Collective over all ranks, on the CPU.

        Args:
            numbers: as many numbers on each rank.
        """
        return self.one_of_each(self._gather_numbers(numbers))

    def one_of_each(self, items: list[T]) -> list[T]:
        """Of one item for each rank of the world, in their order, one for each share of the samples; no communication.

        Args:
            items: what `World.gather` returns.
        """
        if self.size == len(items):
            return items
        places = [self._grid.coordinates(rank) for rank in range(len(items))]
        return [item for item, at in zip(items, places, strict=True) if not (at["pp"] or at["cp"] or at["tp"])]
