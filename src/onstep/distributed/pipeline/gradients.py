"""Sums what several ranks of a pipeline have of one gradient: tied embeddings, and replicas of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from onstep.distributed.shard_sums import sum_together
from onstep.distributed.shards import held_part, held_parts, sharded_modules, updated_shard
from onstep.distributed.world import World

_BUCKET_BYTES = 25 * 2**20


class Divided(Protocol):
    """A stage whose updates ranks divide."""

    def take_gradients(self) -> None: ...
    def finish_grad_sync(self) -> None: ...


class StageGradients:
    """Exchanges the gradients of the stages of this rank, once in a step.

    Replicas of a stage are summed, not averaged. Collective when it is made.

    Args:
        chunks: the stages of this rank.
        world: the ranks of the run.
        tied: the names of the parameters that the first stage and the last, on other ranks, have both.
        divided: what sums the gradients of the stages, where ranks divide their updates.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], world: World, *, tied: Sequence[str], divided: Sequence[Divided] = ()
    ) -> None:
        self._world, self._divided = world, divided
        self._tied: list[nn.Parameter] = []
        self._embedding = None
        if tied:
            pairs: list[tuple[int, ...]] = [(part[0], part[-1]) for part in world.parts("pp")]
            self._embedding = world.group_among(pairs, "embd")
            if self._embedding is not None:
                here = {name: one for chunk in chunks for name, one in chunk.named_parameters()}
                self._tied = [here[name] for name in tied]
        parameters = dict.fromkeys(one for chunk in chunks for one in chunk.parameters())
        are_replicas = world.data.size > 1 and not divided and not any(map(sharded_modules, chunks))
        self._buckets = list(_buckets([*parameters])) if are_replicas else []  # FSDP2 sums those of its shards

    @torch.no_grad()
    def exchange(self) -> None:
        """Sum the gradients of what is trained now over the ranks that share them. Collective.

        Callbacks may freeze and unfreeze parameters, alike on all ranks.
        """
        for chunk in self._divided:
            chunk.take_gradients()
            chunk.finish_grad_sync()
        for tied in (updated_shard(one) for one in self._tied if one.requires_grad):
            if tied.grad is None:
                tied.grad = torch.zeros_like(tied)
            self._world.reduce(held_part(tied.grad), dist.ReduceOp.SUM, "embd", self._embedding)
        for bucket in self._buckets:
            trained = [one for one in bucket if one.requires_grad]
            if trained:
                self._sum(trained)

    def _sum(self, trained: list[nn.Parameter]) -> None:
        for one in trained:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        sum_together(held_parts([one.grad for one in trained if one.grad is not None]), self._world.data.sum)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters of each type, in parts of a bounded size."""
    for dtype in dict.fromkeys(one.dtype for one in parameters):
        bucket: list[nn.Parameter] = []
        for one in (one for one in parameters if one.dtype == dtype):
            if bucket and sum(other.nbytes for other in bucket) + one.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(one)
        if bucket:
            yield bucket
