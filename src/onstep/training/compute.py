"""The arithmetic of one step: forward and backward of its micro-batches, and the scale of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from onstep.data import Batch
from onstep.distributed import no_sync
from onstep.training.job import Job
from onstep.training.losses import MicroLoss, Weight, backward_start, gradient_factor, read_loss
from onstep.training.micro_batches import MicroBatches
from onstep.training.run import Run
from onstep.training.seams import ForwardStep
from onstep.training.step import Step

ForwardPass = Callable[[MicroBatches, Batch, bool], MicroLoss]
"""`(the step's micro-batches, the one whose turn it is, whether it is a filler)`; gives its loss."""


def forward_of(job: Job) -> ForwardPass:
    """The forward pass of one micro-batch, in the precision of the run."""
    return forward_pass(job.run, job.forward_step_func, job.model)


def forward_pass(run: Run, forward_step_func: ForwardStep, model: list[nn.Module]) -> ForwardPass:
    """The forward pass of one micro-batch with any forward step, its state already injected."""
    weighting = run.cfg.train.loss_weighting

    def forward(micro_batches: MicroBatches, batch: Batch, is_filler: bool) -> MicroLoss:
        output, loss_function = forward_step_func(micro_batches, model[0])
        return read_loss(loss_function(output), batch, weighting, is_filler)

    def forward_in_autocast(micro_batches: MicroBatches, batch: Batch, is_filler: bool) -> MicroLoss:
        with run.autocast():
            return forward(micro_batches, batch, is_filler)

    return forward if run.cfg.mixed_precision is None else forward_in_autocast


def backward_start_of(job: Job, micro: MicroLoss, num_micro_batches: int) -> Weight | None:
    """What a micro-batch's backward pass starts from, with the loss scale of float16 in it; None is 1."""
    run, scaler = job.run, job.scaler
    alone = num_micro_batches == 1 and run.world.size == 1
    if alone and scaler is None and micro.kind == "mean":
        return None
    nominal = 1.0 if alone else run.nominal_step_size
    return backward_start(micro, alone, nominal, run.world.size, None if scaler is None else scaler.scale)


def gradient_factor_of(job: Job, step: Step) -> Weight | None:
    """What the step's gradients are multiplied by, now that its weight is known; None is 1."""
    run = job.run
    if len(step.micros) == 1 and run.world.size == 1:
        return None
    return gradient_factor(step.total, step.micros, run.nominal_step_size, run.world.size)


def clear_gradients(job: Job) -> None:
    """Forget the last step's gradients, also in the buffers of chunks that have their own."""
    for chunk in job.chunks_with_buffers:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()


def needs_norm(job: Job) -> bool:
    """Whether anybody looks at the gradient norm of this step: the log, a feature, or a callback."""
    on = job.tell.on
    return bool(
        job.needs_norm
        or job.run.features.needs_grad_norm
        or on.on_pre_optimizer_step
        or on.on_optimizer_step
        or on.on_train_metrics
        or on.on_train_step_end
        or job.run.train_state.overrides
    )


def exchanging(model: list[nn.Module], is_last: bool) -> AbstractContextManager[object]:
    """Around a micro-batch: ranks exchange gradients with the last one of a step only."""
    return _EXCHANGING if is_last else no_sync(model)


_EXCHANGING: AbstractContextManager[object] = nullcontext()
