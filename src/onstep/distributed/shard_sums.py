"""Combines what each rank computes of its shards into values of whole tensors, equal on all ranks to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed.shards import Split, split_of


def has_others(group: Any) -> bool:
    """Whether `group` is a process group with other ranks in it; False for None, or without process groups."""
    size = getattr(group, "size", None)  # absent in a group that does not contain this rank
    return dist.is_available() and dist.is_initialized() and callable(size) and size() > 1


def device_of(group: Any) -> torch.device:
    """The device on which tensors must be for collectives over `group`."""
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")


class ShardSums:
    """Adds up parts of sums over the ranks that hold the shards: one small collective for each mesh dimension.

    The ranks of a dimension gather the values, and each adds them in the same order, so the result does not depend on
    how a backend reduces. Along a dimension over which its tensor is not sharded, a value counts once, and the greatest
    replaces that of each replica: a NaN, an infinity or a deviation in one replica is then seen by all ranks alike.
    Meshes may differ between the values; dimensions that consist of the same ranks share their collective.

    Args:
        splits: how the tensors behind each value are sharded (`split_of`), in the same order on all ranks of a mesh.
    """

    def __init__(self, splits: Sequence[Split]) -> None:
        groups: dict[tuple[int, ...], Any] = {}
        summed: dict[Split, set[tuple[int, ...]]] = {}
        for split in dict.fromkeys(splits):
            own = summed[split] = set()
            for group, holds_other_parts in split.groups():
                ranks = tuple(dist.get_process_group_ranks(group))
                groups.setdefault(ranks, group)
                if holds_other_parts:
                    own.add(ranks)
        # A rank that holds another part by another mesh is not a replica: in between, the value stays as it is.
        others = [split.plane() - {dist.get_rank()} for split in splits] if groups else []
        self._stages = [
            _Stage(group, [ranks in summed[split] for split in splits], [one.isdisjoint(ranks) for one in others])
            for ranks, group in groups.items()
        ]

    @property
    def has_others(self) -> bool:
        """Whether other ranks hold shards or replicas, so that a call is collective."""
        return bool(self._stages)

    def __call__(self, values: Tensor, combine: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The values of whole tensors. Collective over the meshes; does not wait for the device.

        Args:
            values: this rank's part of each value, (num_values,); any number if they have a single split.
            combine: replaces the sum of the parts: from (num_ranks, num_values) to (num_values,).
        """
        for stage in self._stages:
            values = stage(values, combine or _sum)
        return values


class _Stage:
    """The collective of one mesh dimension."""

    def __init__(self, group: Any, are_summed: list[bool], are_equal: list[bool]) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        backend = dist.get_backend(group)
        self._needs = {"nccl": "cuda", "gloo": "cpu"}.get(backend)
        self._are_all_summed, self._masks = all(are_summed), torch.tensor([are_summed, are_equal])

    def __call__(self, values: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        home = values.device
        sent = values if self._needs in (None, home.type) else values.to(self._needs)
        of_ranks = sent.new_empty(self._size, len(sent))
        dist.all_gather(list(of_ranks.unbind()), sent.contiguous(), group=self._group)
        of_ranks = of_ranks.to(home)
        combined = combine(of_ranks)
        if self._are_all_summed:
            return combined
        if self._masks.device != home:
            self._masks = self._masks.to(home)
        are_summed, are_equal = self._masks
        return combined.where(are_summed, of_ranks.amax(0).where(are_equal, values))


def _sum(of_ranks: Tensor) -> Tensor:
    total: Tensor = of_ranks.sum(0)
    return total


def sum_together(tensors: Sequence[Tensor], reduce: Callable[[Tensor], object]) -> None:
    """Sum tensors of one type over ranks, in place, by one sum of all of them. Collective.

    Args:
        tensors: of this rank, as many and as large as those of the others.
        reduce: sums a tensor over the ranks, in place.
    """
    together = torch.cat([one.flatten() for one in tensors])
    reduce(together)
    totals = torch.split(together, [one.numel() for one in tensors])
    torch._foreach_copy_(list(tensors), [total.view_as(one) for one, total in zip(tensors, totals, strict=True)])


class Kinds:
    """Tensors by how they are sharded, which is found out once.

    Args:
        tensors: plain tensors and DTensors, in the same order on all ranks of a mesh.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        by_split: dict[Split, list[Tensor]] = {}
        for tensor in tensors:
            by_split.setdefault(split_of(tensor), []).append(tensor)
        self.members = list(by_split.values())
        self.sums = ShardSums(list(by_split))
        """Adds up one value of each kind."""
