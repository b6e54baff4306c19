"""What the loop's own step gives the rerun state machine: its losses, and the buffers that a forward pass changes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from onstep.config.parts import RerunStateMachineConfig
from onstep.data import StepBatches
from onstep.training.losses import MicroLoss, as_scalar
from onstep.training.rerun import RerunStateMachine
from onstep.training.rerun_data_iterator import shallow_copy
from onstep.training.rerun_validation import is_infinite, is_nan


def fresh_batches(batches: StepBatches) -> StepBatches:
    """The step's micro-batches for one more run: a forward step may have taken entries out of them."""
    return replace(batches, micro_batches=[shallow_copy(batch) for batch in batches.micro_batches])


def validate_losses(machine: RerunStateMachine, micros: list[MicroLoss], config: RerunStateMachineConfig) -> None:
    """Validate the losses of a step on this rank, one by one; micro-batches that count nothing are left out.

    NaN and infinity are fatal, a spike (`spiky_loss_factor`) is not. Reads the device once. Does nothing while the
    machine is disabled: what is not finite is then refused before the update, by `train.on_nonfinite`.
    """
    if not machine.is_enabled:
        return
    for loss in _mean_losses(micros):
        if config.check_for_nan_in_loss:
            machine.validate_result(loss, is_nan, "found NaN in local forward loss calculation")
            machine.validate_result(loss, is_infinite, "found Inf in local forward loss calculation")
        if config.check_for_spiky_loss:
            machine.validate_result(
                loss,
                lambda value: machine.is_unexpectedly_large(value, config.spiky_loss_factor, context="loss"),
                "Spiky loss",
                fatal=False,
            )


def save_buffers(model: list[nn.Module]) -> list[Tensor]:
    """Copies of all buffers (running statistics and the like), for `state_save_func`."""
    return [buffer.detach().clone() for chunk in model for buffer in chunk.buffers()]


def restore_buffers(model: list[nn.Module], saved: list[Tensor]) -> None:
    """Put the values of `save_buffers` back, in place, for `state_restore_func`."""
    for buffer, value in zip((one for chunk in model for one in chunk.buffers()), saved, strict=True):
        buffer.detach().copy_(value)


def _mean_losses(micros: list[MicroLoss]) -> list[float]:
    """The losses of the micro-batches that have weight, as numbers; a sum is divided by what it is the sum of."""
    if not micros:
        return []

    device = micros[0].loss.device
    losses = torch.stack([as_scalar(micro.loss.detach(), torch.float64, device).reshape(()) for micro in micros])
    weights = torch.stack([as_scalar(micro.weight, torch.float64, device).reshape(()) for micro in micros])
    values, counts = torch.stack([losses, weights]).tolist()
    return [
        value / count if micro.kind == "sum" else value
        for micro, value, count in zip(micros, values, counts, strict=True)
        if count != 0
    ]
