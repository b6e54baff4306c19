"""Runs the micro-batches of a step through the stages of a pipeline, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from onstep.config.pipelines import schedule_of
from onstep.distributed.buffered import buffered_chunks
from onstep.distributed.pipeline.gradients import StageGradients
from onstep.distributed.pipeline.seats import seat_of
from onstep.errors import ConfigError
from onstep.training.compute.losses import NO_GRADIENT, MicroLoss, read_loss
from onstep.training.compute.step import MicroBatches, Step, mean_loss
from onstep.training.engines.auxiliary_losses import AuxiliaryLosses
from onstep.training.feature import Need
from onstep.training.stages import forward_backward as compute
from onstep.training.stages.job import Job
from onstep.training.stages.staged import StagedForward, without_values


class PipelineEngine:
    """The engine of a rank that has stages of a pipeline; see `Engine`.

    A micro-batch's events fire where its passes run: `on_forward_backward_start` before its first forward pass here,
    `on_forward_backward_end` and `on_substep_end` after its last backward pass here, with the loss on the last stage.

    Args:
        job: the training, whose features are built.
    """

    gives: frozenset[Need] = frozenset()

    def __init__(self, job: Job) -> None:
        self.job, self.run, self.notify, self.on = job, job.run, job.notify, job.run.features
        self.name = f"the pipeline schedule {schedule_of(self.run.cfg.parallel).name}"
        self.staged = StagedForward(self.run, job.forward_step_func, job.model)
        seats = [seat_of(chunk) for chunk in self.staged.chunks]
        self._ends = [seat is not None and seat.is_last for seat in seats]
        around: Callable[[Callable[[], None]], None] = self.on.wrap("backward", lambda work: work())
        has_routers = getattr(self.staged.chunks[0].config, "num_moe_experts", None) is not None
        self.further = AuxiliaryLosses(self.staged.chunks) if has_routers else None
        self.passes = self.staged.passes(
            self.on.wrap("forward", self.forward),
            backward=around,
            after_backward=self.after_backward,
            further=self.further,
        )
        is_v = schedule_of(self.run.cfg.parallel).chunks == "two"
        tied = () if is_v else self.staged.chunks[0].tied_weights
        self.gradients = StageGradients(
            self.staged.chunks, self.run.world, tied=tied, divided=buffered_chunks(job.model)
        )

    def compute(self, step: Step) -> None:
        """Run the passes of all micro-batches, and sum the gradients that several ranks have."""
        job, count = self.job, len(step.batches.micro_batches)
        compute.clear_gradients(job)
        self.on.after_zero_grad()
        self.step, self.micro_batches = step, MicroBatches(step.batches, self.run.world.device)
        self.losses: list[MicroLoss | None] = [None] * count
        self.left = [len(self._ends)] * count
        self.num_done = 0
        if not job.modes.module.training or job.modes.epoch != self.run.train_state.epoch:
            job.modes.keep(self.run.train_state.epoch)
        self.passes.train(self.staged.shapes(step.batches))
        step.micros = [micro for micro in self.losses if micro is not None]
        self.gradients.exchange()

    def forward(self, number: int, index: int, received: Tensor | None) -> Tensor:
        """The forward pass of a micro-batch through a chunk; of the last stage, what its backward pass starts from."""
        step, batches = self.step, self.step.batches
        batch, is_filler = self.micro_batches.stage(index), batches.is_filler[index]
        self.on.before_micro_batch(is_filler)
        if number == 0:
            self.notify.on_forward_backward_start(micro_batch=batch)
        result = self.staged(self.micro_batches, number, index, received)
        if not self._ends[number]:
            assert isinstance(result, Tensor)
            return result
        micro = self.losses[index] = read_loss(result, batch, self.run.cfg.train.loss_weighting, is_filler)
        if micro.loss.is_meta:
            raise without_values(self.staged.chunks[number], "the loss is on the device meta")
        if not micro.loss.requires_grad:
            raise ConfigError(NO_GRADIENT)
        start = compute.backward_start_of(self.job, micro, len(batches.micro_batches))
        self.on.before_backward(step, micro, start)
        if self.further is not None:
            num_starts = len(batches.micro_batches) * self.run.world.data.size
            self.further.factor = compute.auxiliary_start(micro, start, num_starts)
        whole = micro.loss.reshape(())
        loss = whole.clone() if start is None else whole * start  # torch detaches it in place, which no view can be
        micro.keep()
        return loss

    def after_backward(self, index: int) -> None:
        """Fire the events of a micro-batch, once all chunks of this rank have its gradients."""
        self.left[index] -= 1
        if self.left[index]:
            return
        self.num_done += 1
        batch = self.step.batches.micro_batches[index]
        if self.notify.on.on_forward_backward_end:
            micro = self.losses[index]
            loss = None if micro is None else mean_loss([micro])
            self.notify.on_forward_backward_end(micro_batch=batch, loss=loss)
        if self.num_done < len(self.left):
            self.notify.on_substep_end()
