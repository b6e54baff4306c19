"""Runs the micro-batches of a step one after the other, each forward and at once backward, on a whole model."""

from __future__ import annotations

from collections.abc import Callable

from onstep.training.compute.step import MicroBatches, Step, mean_loss
from onstep.training.feature import Need
from onstep.training.stages import forward_backward as compute
from onstep.training.stages.job import Job


class LoopEngine:
    """The engine of a model that this rank calls as a whole; see `Engine`.

    Args:
        job: the training, whose features are built.
    """

    gives: frozenset[Need] = frozenset(("loss", "backward", "replay"))
    name = "a loop over micro-batches"

    def __init__(self, job: Job) -> None:
        self.job, self.run, self.notify, self.on = job, job.run, job.notify, job.run.features
        self.forward: compute.ForwardPass = self.on.wrap("forward", compute.forward_of(job))
        self.backward: Callable[..., None] = self.on.wrap("backward", compute.backward_of(job))

    def compute(self, step: Step) -> None:
        """Run forward and backward of each micro-batch; ranks exchange gradients with the last one."""
        job, on, notify = self.job, self.on, self.notify
        compute.clear_gradients(job)
        on.after_zero_grad()
        micro_batches, step.micros = MicroBatches(step.batches, self.run.world.device), []
        last = len(step.batches.micro_batches) - 1
        for index in range(last + 1):
            batch, is_filler = micro_batches.stage(index), step.batches.is_filler[index]
            on.before_micro_batch(is_filler)
            notify.on_forward_backward_start(micro_batch=batch)
            with compute.exchanging(job, index == last):
                micro = self.forward(micro_batches, batch, is_filler)
                start = compute.backward_start_of(job, micro, last + 1)
                on.before_backward(step, micro, start)
                self.backward(micro, start)
            micro.keep()
            step.micros.append(micro)
            if notify.on.on_forward_backward_end:
                notify.on_forward_backward_end(micro_batch=batch, loss=mean_loss([micro]))
            if index < last:
                notify.on_substep_end()
