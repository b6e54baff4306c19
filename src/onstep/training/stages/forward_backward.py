"""Computes a step: forward and backward passes of its micro-batches, gradient scaling, and buffer snapshots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from onstep.data import Batch
from onstep.distributed import no_sync
from onstep.distributed.exchanges import keeping_local
from onstep.training.compute.forward_errors import call_forward_step
from onstep.training.compute.loss_sums import divisor, is_known
from onstep.training.compute.losses import MicroLoss, Scalar, read_loss
from onstep.training.compute.step import MicroBatches, Step
from onstep.training.stages.job import Job, check_for_gradients

ForwardPass = Callable[[MicroBatches, Batch, bool], MicroLoss]
"""`(the step's micro-batches, the current one, whether it is a filler)`; returns its loss."""


def forward_of(job: Job) -> ForwardPass:
    """The forward pass of one micro-batch, in the run's precision."""
    run, forward_step_func, [model] = job.run, job.forward_step_func, job.model
    weighting, modes, progress = run.cfg.train.loss_weighting, job.modes, run.train_state
    module = modes.module

    def forward(micro_batches: MicroBatches, batch: Batch, is_filler: bool) -> MicroLoss:
        if not module.training or modes.epoch != progress.epoch:
            modes.keep(progress.epoch)
        iterator = micro_batches if micro_batches.batches.has_data else None
        result = call_forward_step(forward_step_func, iterator, batch, model, run.train_state.step)
        return read_loss(result, batch, weighting, is_filler)

    def forward_in_autocast(micro_batches: MicroBatches, batch: Batch, is_filler: bool) -> MicroLoss:
        with run.autocast():
            return forward(micro_batches, batch, is_filler)

    return forward if run.cfg.mixed_precision is None else forward_in_autocast


def backward_of(job: Job) -> Callable[[MicroLoss, Scalar | None], None]:
    """The backward pass of one micro-batch; empty for a forward step with `runs_backward`, which has run it."""
    return _nothing if job.runs_backward else MicroLoss.backward


def _nothing(micro: MicroLoss, start: Scalar | None) -> None:
    pass


def backward_start_of(job: Job, micro: MicroLoss, num_micro_batches: int) -> Scalar | None:
    """The value that a micro-batch's backward pass starts from, including the loss scale of float16; None means 1.

    For a step of one micro-batch on one rank, the weight is known at once. A share is not divided, so where the ranks
    average their gradients it is multiplied by what that divides by.
    """
    run, kind, weight = job.run, micro.kind, micro.weight
    alone = num_micro_batches == 1 and run.world.data.size == job.divisor == 1
    nominal = 1.0 if alone else run.nominal_step_size
    start: Scalar | None = None
    if kind == "mean":
        start = None if alone else weight / nominal
    elif kind == "sum" and alone:
        start = 1.0 / divisor(weight, micro.loss)
    elif is_known(weight, 0):
        start = 0.0
    elif kind == "sum":
        start = 1.0 / nominal
    else:
        start = None if job.divisor == 1 else job.divisor
    if job.scaler is None:
        return start
    return job.scaler.scale if start is None else start * job.scaler.scale


def gradient_factor_of(job: Job, step: Step) -> Scalar | None:
    """The factor for the step's gradients, now that there are some and the step's weight is known; None means 1."""
    if not job.has_gradients:
        check_for_gradients(job)
    run, size, divisor_of_sum = job.run, job.run.world.data.size, job.divisor
    if step.total.kind == "share":  # a user's own backward pass is made for an average over the ranks
        return divisor_of_sum / size if job.runs_backward and divisor_of_sum != size else None
    if len(step.batches.micro_batches) == 1 and size == divisor_of_sum == 1:
        return None
    factor = run.nominal_step_size * divisor_of_sum / divisor(step.total.weight, step.total.numerator)
    return None if is_known(factor, 1) else factor


def clear_gradients(job: Job) -> None:
    """Clear the last step's gradients, including the buffers of chunks that manage their own."""
    for chunk in job.chunks_with_buffers:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()


def needs_norm(job: Job) -> bool:
    """Whether the log, a feature or a callback uses the gradient norm of this step."""
    on = job.notify.on
    return bool(
        job.needs_norm
        or job.run.features.needs_grad_norm
        or on.on_pre_optimizer_step
        or on.on_optimizer_step
        or on.on_train_metrics
        or on.on_train_step_end
        or job.run.train_state.overrides
    )


def exchanging(job: Job, is_last: bool) -> AbstractContextManager[object]:
    """Context of a micro-batch: ranks exchange gradients with each one, or only with the last one of a step."""
    if is_last or job.exchanges_each:
        return _EXCHANGING
    return keeping_local(job.sharded) if job.sharded else no_sync(job.model)


_EXCHANGING: AbstractContextManager[object] = nullcontext()


class BufferGuard:
    """Restores buffers, such as the running statistics of a batch norm, to their state at the start of a step.

    A forward pass changes them before it is known whether the step is good.

    Only covers buffers that are saved with the model, unless `saved_only` is False. Free for a model without any.
    """

    def __init__(self, model: list[nn.Module], *, saved_only: bool = True) -> None:
        self._places = {
            id(buffer): (module, name)
            for chunk in model
            for module in chunk.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not (saved_only and name in module._non_persistent_buffers_set)
        }
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current buffers."""
        buffers = self._buffers()
        if [copy.shape for copy in self._copies] != [buffer.shape for buffer in buffers]:
            self._copies = [buffer.clone() for buffer in buffers]
            return
        for copy, buffer in zip(self._copies, buffers, strict=True):
            copy.copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers to the copies that `keep` made."""
        for copy, (module, name) in zip(self._copies, self._places.values(), strict=False):
            buffer = getattr(module, name)
            if buffer.shape == copy.shape:
                buffer.copy_(copy)
            else:
                setattr(module, name, copy.clone())

    def _buffers(self) -> list[Tensor]:
        """The current buffers: a forward pass may replace one with another tensor, even of another size."""
        return [getattr(module, name) for module, name in self._places.values()]


def auxiliary_start(micro: MicroLoss, start: Scalar | None, num_starts: int) -> Scalar:
    """The value that the backward pass of a micro-batch's auxiliary losses starts from.

    With it, the gradient of a step is that of

        main loss + coefficient * mean over micro-batches and ranks of the auxiliary loss,

    where each micro-batch has the same weight as in the main loss: by its labels, or by `train.loss_weighting`. Shares
    (`LossShare`), whose total is not known here, all have the same weight.

    Args:
        start: where the main loss starts (`backward_start_of`), including the loss scale; None means 1.
        num_starts: micro-batches of the step on one rank, times the number of ranks.
    """
    start = 1.0 if start is None else start
    if micro.kind == "share":
        return start / num_starts
    return start * micro.weight if micro.kind == "sum" else start
