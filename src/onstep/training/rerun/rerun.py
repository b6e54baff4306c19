"""Feeds batches and losses of the loop's own step to the rerun state machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from onstep.config import RerunStateMachineConfig
from onstep.data import StepBatches
from onstep.events import Request
from onstep.training.compute.losses import MicroLoss, as_scalar
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.protocols import StateDict
from onstep.training.rerun.machine import RerunStateMachine
from onstep.training.rerun.snapshot import shallow_copy
from onstep.training.stages.ending import Leave
from onstep.training.stages.forward_backward import BufferGuard
from onstep.training.stages.job import Job


@dataclass
class GivenMachine:
    """The machine that a caller set for steps that are trained without `train()`."""

    machine: RerunStateMachine = field(default_factory=RerunStateMachine)


class RerunMachine(Feature[Job]):
    """Recomputes a suspicious step, and exits if the cause cannot be determined here."""

    name = "rerun"
    when = "rerun_state_machine.rerun_mode"
    collective = True
    per_rank = True
    has_state = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """If results are validated, or if a resumed run must report results that its checkpoint holds in question."""
        run = host.run
        if run.cfg.rerun_state_machine.rerun_mode != "disabled":
            return True
        found = run.checkpoints.start if run.checkpoints is not None and run.is_resumed else None
        return found is not None and "rank" in found.manifest.components

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._run, self._reader, self._config = host.run, host.reader, host.run.cfg.rerun_state_machine
        self._position: StateDict = {}
        buffers = BufferGuard(host.model, saved_only=False)
        self.machine = RerunStateMachine.from_config(
            self._config,
            self._run.world,
            state_save_func=buffers.keep,
            state_restore_func=lambda _: buffers.restore(),
        )
        self.machine.current_iteration = self._run.train_state.step
        self.has_state = self.machine.is_enabled or self._run.is_resumed
        if self.machine.is_enabled:
            self.needs_of_engine = ("loss", "replay")

    def begin(self) -> None:
        """Number the steps from the run's current step; a disabled machine has nothing to save."""
        self.machine.current_iteration = self._run.train_state.step
        self.has_state = self.machine.is_enabled

    def wrap_read(self, read: Callable[[], StepBatches | None]) -> Callable[[], StepBatches | None]:
        if not self.machine.is_enabled:
            return read

        def noted() -> StepBatches | None:
            self._position = self._reader.state_dict()
            return read()

        return noted

    def wrap_compute(self, compute: Callable[[Step], None]) -> Callable[[Step], None]:
        machine = self.machine
        if not machine.is_enabled:
            return compute

        def computed(step: Step) -> None:
            batches = step.batches
            while machine.should_run_forward_backward():
                step.batches = fresh_batches(batches)
                compute(step)
                validate_losses(machine, step.micros, self._config)
            step.batches = batches
            saves, leaves, exit_code = machine.should_checkpoint_and_exit()
            if leaves:
                conclusion, details = machine.conclusion or "", {"exit_code": exit_code}
                decision = Request("rerun_exit", "rerun state machine", "", conclusion, self._run.world.rank, details)
                why = "before exiting, to recompute a result"
                raise Leave(exit_code, decision, self._position if saves else None, why)

        return computed

    def after_skip(self) -> None:
        self.machine.current_iteration = self._run.train_state.step

    def pause(self, work: Interruption) -> AbstractContextManager[object]:
        """Rerun nothing in evaluations: their results are validated at once."""
        return self.machine.disabled() if work == "score" and self.machine.is_enabled else nullcontext()

    @property
    def stateful(self) -> RerunStateMachine:
        return self.machine


def fresh_batches(batches: StepBatches) -> StepBatches:
    """Copy the step's micro-batches for one more run: a forward step may have removed entries from them."""
    return replace(batches, micro_batches=[shallow_copy(batch) for batch in batches.micro_batches])


def validate_losses(machine: RerunStateMachine, micros: list[MicroLoss], config: RerunStateMachineConfig) -> None:
    """Validate the losses of a step on this rank, one by one, except for micro-batches without weight.

    NaN and infinity are fatal, a spike (`spiky_loss_factor`) is not. Reads the device once. Does nothing while the
    machine is disabled: `train.on_nonfinite` then handles non-finite values before the update.
    """
    if not machine.is_enabled:
        return
    for loss in _mean_losses(micros):
        if config.check_for_nan_in_loss:  # the messages of this function are Megatron Bridge's
            machine.validate_result(loss, math.isnan, "found NaN in local forward loss calculation")
            machine.validate_result(loss, math.isinf, "found Inf in local forward loss calculation")
        if config.check_for_spiky_loss:
            machine.validate_result(
                loss,
                lambda value: machine.is_unexpectedly_large(value, config.spiky_loss_factor, context="loss"),
                "Spiky loss",
                fatal=False,
            )


def _mean_losses(micros: list[MicroLoss]) -> list[float]:
    """The losses of the micro-batches that have weight, as numbers; a sum is divided by its count."""
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
