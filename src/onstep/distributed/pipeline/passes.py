"""Runs the passes of a step's micro-batches through the stages of a pipeline, in the order of a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from onstep.config.pipelines import Schedule
from onstep.distributed.pipeline.seats import seat_of
from onstep.distributed.pipeline.stage import FurtherLosses, Stage
from onstep.distributed.world import World

_MOST_PLANS = 8
"""Numbers of micro-batches whose orders are kept."""

ChunkForward = Callable[[int, int, Tensor | None], Tensor]
"""(number of the chunk on this rank, of the micro-batch, what the stage before has computed, if any)."""


class Passes:
    """The stages of this rank, and how the micro-batches of a step go through them.

    Args:
        chunks: the stages, ascending.
        world: the ranks of the run.
        schedule: the order of the passes.
        dtype: the type of hidden states.
        forward: the forward pass of a micro-batch through a chunk; on the last stage it returns the loss.
        backward: calls a backward pass; for wrappers of it.
        after_backward: called with the number of a micro-batch whose gradients a chunk has in full.
        further: losses of layers, in training; None on all ranks for none.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        world: World,
        schedule: Schedule,
        dtype: torch.dtype,
        forward: ChunkForward,
        backward: Callable[[Callable[[], None]], None] = lambda work: work(),
        after_backward: Callable[[int], None] = lambda index: None,
        further: FurtherLosses | None = None,
    ) -> None:
        self._schedule, self._dtype, self._num_ranks = schedule, dtype, world.sizes.pp
        self._plans: dict[int, Any] = {}
        group = world.group("pp")
        # repeats the error of a pass, with the whole schedule
        logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)
        self._stages = []
        for number, chunk in enumerate(chunks):
            seat = seat_of(chunk)
            assert seat is not None
            self._stages.append(
                Stage(
                    chunk,
                    seat,
                    _ranks_of(schedule, self._num_ranks, seat.num_stages),
                    group,
                    world.device,
                    forward=partial(forward, number),
                    backward=backward,
                    after_backward=after_backward,
                    further=further,
                )
            )
        for stage in self._stages:
            stage.neighbours = [one for one in self._stages if one is not stage]
        self.has_loss: bool = any(stage.is_last for stage in self._stages)
        """Whether the last stage is here."""

    def train(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Run all forward and backward passes of a step. Collective over the pipeline.

        Args:
            shapes: of the hidden states of each micro-batch.
        """
        self._expect(shapes, has_backward=True)
        target = torch.empty(len(shapes)) if self.has_loss else None
        self._run(partial(self._plan(len(shapes)).step, target=target, return_outputs=False))

    def forward(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Run the forward passes of any number of micro-batches. Collective over the pipeline.

        Args:
            shapes: of the hidden states of each micro-batch.
        """
        self._expect(shapes, has_backward=False)
        self._run(partial(self._forward, len(shapes)))

    def _forward(self, num_micro_batches: int) -> None:
        sent: list[dist.Work] = []
        here = {stage.stage_index: stage for stage in self._stages}
        for stage in self._stages:
            stage.clear_runtime_states()
            for index in range(num_micro_batches):
                if stage.stage_index - 1 not in here:
                    schedules._wait_batch_p2p(schedules._batch_p2p(stage.get_fwd_recv_ops(index)))
                output = stage.forward_one_chunk(index, (), save_forward_output=False)
                following = here.get(stage.stage_index + 1)
                if following is not None:
                    following.set_local_fwd_input(output, index)
                else:
                    sent += schedules._batch_p2p(stage.get_fwd_send_ops(index))
        schedules._wait_batch_p2p(sent)
        for stage in self._stages:
            stage.clear_runtime_states()

    def _expect(self, shapes: Sequence[tuple[int, ...]], *, has_backward: bool) -> None:
        for stage in self._stages:
            stage.expect(shapes, self._dtype, has_backward=has_backward)

    def _run(self, work: Callable[[], object]) -> None:
        """Do the work; what a pass raised comes as it was."""
        for stage in self._stages:
            stage.call.error = None
        try:
            work()
        except Exception:
            for stage in self._stages:
                if stage.call.error is not None:
                    raise stage.call.error from None
            raise

    def _plan(self, num_micro_batches: int) -> Any:
        """torch's schedule for so many micro-batches; a short step may have one for any number."""
        plan = self._plans.get(num_micro_batches)
        if plan is None:
            schedule = self._schedule
            if not schedule.runs(self._num_ranks, num_micro_batches):
                schedule = schedule.for_any_number
            kind: Any = schedules.get_schedule_class(schedule.name)
            of_one = schedule.chunks == "one"
            given = self._stages[0] if of_one else self._stages
            plan = kind(given, num_micro_batches, loss_fn=lambda loss, target: loss, scale_grads=False)
            name = "_stage" if of_one else "_stages"
            setattr(plan, f"{name}_forward_initialized", True)
            setattr(plan, f"{name}_backward_initialized", True)
            while len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[num_micro_batches] = plan
        return plan


def _ranks_of(schedule: Schedule, num_ranks: int, num_stages: int) -> list[int]:
    """The rank of each stage."""
    if schedule.chunks == "two":
        return [*range(num_ranks), *reversed(range(num_ranks))]
    return [stage % num_ranks for stage in range(num_stages)]
