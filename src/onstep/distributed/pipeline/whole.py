"""Runs inputs through all stages of a pipeline outside of its schedule, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep.config.pipelines import Schedule
from onstep.distributed.pipeline.elsewhere import items_of_stages
from onstep.distributed.pipeline.seats import names_of_whole
from onstep.distributed.world import World

if TYPE_CHECKING:
    from onstep.distributed.pipeline.passes import Passes

Item = TypeVar("Item")

StageForward = Callable[[nn.Module, Tensor | None], Tensor]
"""(stage, what the stage before has computed); what is sent on, or of the last stage the result."""


def pipeline_of(chunk: nn.Module) -> WholePipeline | None:
    """The pipeline that a chunk is a stage of; None for a whole model."""
    found = getattr(chunk, "pipeline", None)
    return found if isinstance(found, WholePipeline) else None


class WholePipeline:
    """The stages of this rank as a part of all of them.

    Args:
        chunks: the stages of this rank, ascending.
        world: the ranks of the run.
        schedule: by which they are divided among the ranks.
    """

    def __init__(self, chunks: Sequence[nn.Module], world: World, schedule: Schedule) -> None:
        self.chunks = list(chunks)
        self.world, self._schedule = world, schedule

    def __deepcopy__(self, memo: object) -> WholePipeline:
        """The same object: ranks and groups have no copies."""
        return self

    def run(self, forward: StageForward, shape: tuple[int, ...], result: Tensor) -> Tensor:
        """Run one input forward, and give all ranks what the last stage makes of it. Collective over the pipeline.

        Args:
            forward: the pass through a stage.
            shape: of the hidden states between stages.
            result: as large as the result and of its type; overwritten.
        """
        self._forward, self._result = forward, result
        self._passes.forward([shape])
        dist.broadcast(result, self._last_rank, group=self.world.group("pp"))
        return result

    def merged(self, own: Mapping[str, Item]) -> dict[str, Item]:
        """What all stages have by name, in the order of the whole model; of a tied one, the first stage's. Collective.

        Args:
            own: small picklable objects of this rank, by names of parameters.
        """
        merged: dict[str, Item] = {}
        for of_rank in items_of_stages(dict(own), self.world):
            merged |= {name: item for name, item in of_rank.items() if name not in merged}
        order = {name: place for place, name in enumerate(names_of_whole(self.chunks[0]))}
        return dict(sorted(merged.items(), key=lambda item: order.get(item[0], len(order))))

    @cached_property
    def _passes(self) -> Passes:
        from onstep.distributed.pipeline.passes import Passes  # imports torch's pipelines

        dtype = next(self.chunks[0].parameters()).dtype
        return Passes(self.chunks, self.world, self._schedule, dtype, self._pass)

    @property
    def _last_rank(self) -> int:
        return self.world.part("pp")[0 if self._schedule.chunks == "two" else -1]

    def _pass(self, number: int, index: int, received: Tensor | None) -> Tensor:
        chunk: Any = self.chunks[number]
        output = self._forward(chunk, received)
        if not chunk.pipeline_seat.is_last:
            return output.contiguous()
        self._result.copy_(output)
        return torch.empty(0)
