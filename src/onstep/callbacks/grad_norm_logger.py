"""Records the gradient norm of each parameter in `gradient_norms.json`, at every evaluation."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from onstep.config import TrainingArguments
from onstep.distributed.shards import world_size
from onstep.events import RunState, TrainerCallback
from onstep.metrics.norms.named_parameters import MissingOnce, Model
from onstep.metrics.norms.parameter_norms import LocalNorms, are_over_ranks, full_norms, local_gradient_norms
from onstep.record.writer import JsonLogWriter, logging_dir_of
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)


class GradNormLogger(TrainerCallback):
    """Appends ``{"grad_norms": {<parameter>: <L2 norm>}}`` to ``<args.logging_dir>/gradient_norms.json``.

    There is one record per evaluated step, with the gradients of that step's update as seen by the optimizer: clipped
    and averaged over ranks. `global_step` and `epoch` are those of the evaluation. Parameters without a gradient are
    omitted; a tied parameter is listed under its first name.

    Only evaluated steps have a cost. If the evaluation is foreseeable (every `eval_steps`, the last step of an epoch or
    of the run), the norms are computed right before the update, without waiting for the device. If a callback requests
    it after the update, they are computed when the evaluation begins, from the gradients that are still present, which
    torch's optimizers do not modify. They are copied off the device in one transfer. For sharded parameters (FSDP2,
    tensor parallelism), the norms are those of the full tensors, and in a pipeline those of all stages.

    The callback's state contains the latest norms, so a run that is stopped during an evaluation records them when it
    is resumed. The file is continued, truncated and preserved as by `JsonLogger`.

    With an optimizer that updates inside the backward pass (`args.fuse_optim_with_backward`), gradients cannot be
    observed; the callback warns and records nothing.
    """

    reads_weights = False

    def __init__(self) -> None:
        self._writer = JsonLogWriter("gradient_norms.json")
        self._missing = MissingOnce(self.name)
        self._captured = _Captured()

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Open the file, truncated to the step that training resumes from."""
        directory = _directory(args)
        if getattr(args, "fuse_optim_with_backward", False):
            logger.warning(
                "%s records nothing: with fuse_optim_with_backward, gradients are freed before they can be measured",
                self.name,
            )
        elif state.is_world_process_zero:
            if directory is None:
                logger.warning(
                    "%s records nothing: the run has no directory; set run.name or logger.logging_dir", self.name
                )
            else:
                self._writer.open(directory, state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: RunState, control: object, model: nn.Module, **kwargs: object
    ) -> None:
        """Measure the gradients of a step that will be evaluated, without waiting for the device."""
        if _directory(args) is not None:
            self._captured.live_step = state.global_step + 1
            if _is_foreseen(state):
                self._capture(model)

    def on_eval_start(
        self, args: TrainingArguments, state: RunState, control: object, model: nn.Module, **kwargs: object
    ) -> None:
        """Measure the gradients of a step whose evaluation was not foreseeable."""
        captured = self._captured
        if _directory(args) is not None and state.global_step == captured.live_step != captured.step:
            self._capture(model)

    def on_evaluate(
        self, args: TrainingArguments, state: RunState, control: object, model: nn.Module, **kwargs: object
    ) -> None:
        """Record the norms of the evaluated step. Collective if parameters are sharded, or in stages."""
        directory, captured = _directory(args), self._captured
        if directory is None or captured.step != state.global_step:
            return
        needs_all = are_over_ranks(model)
        if not (state.is_world_process_zero or needs_all):
            return
        self._missing.say(model)
        if needs_all and captured.num_ranks != world_size():
            text = "gradient norms of step %d were captured on %d ranks; dropped"
            logger.warning(text, captured.step, captured.num_ranks)
            return
        norms = full_norms(captured.norms, model, are_of_gradients=True)
        if norms and state.is_world_process_zero:
            self._writer.reopen(directory)
            if self._writer.last_step != state.global_step:
                self._writer.write_record(state.global_step, state.epoch, {"grad_norms": norms})

    def on_run_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Close the file; a later evaluation reopens it."""
        self._writer.close()

    def state_dict(self) -> StateDict:
        """The position in the file, and this rank's norms of the last step, still on the device."""
        captured = self._captured
        names, values = list(captured.norms.names), captured.norms.values.clone()
        last = {"step": captured.step, "num_ranks": captured.num_ranks, "names": names, "values": values}
        return {"writer": self._writer.state_dict(), "last": last}

    def make_durable(self) -> None:
        """Fsync the file, before a checkpoint that refers to it is committed."""
        self._writer.make_durable()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a checkpoint's file position: when training begins, or immediately in a rollback.

        Args:
            state_dict: what `state_dict()` returned.
        """
        self._writer.load_state_dict(state_dict["writer"])
        last = state_dict["last"]
        norms = LocalNorms(tuple(last["names"]), last["values"])
        self._captured = _Captured(norms, last["step"], last["num_ranks"])

    def _capture(self, model: Model) -> None:
        live_step = self._captured.live_step
        self._captured = _Captured(local_gradient_norms(model), live_step, world_size(), live_step)


@dataclass
class _Captured:
    """The norms that this rank captured last, still on the device."""

    norms: LocalNorms = field(default_factory=LocalNorms.none)
    step: int = -1
    num_ranks: int = 0
    live_step: int = -1
    """The step whose gradients are still present."""


def _directory(args: TrainingArguments) -> Path | None:
    return None if getattr(args, "fuse_optim_with_backward", False) else logging_dir_of(args)


def _is_foreseen(state: RunState) -> bool:
    """Whether the current step is likely to be evaluated."""
    step, interval = state.global_step + 1, state.eval_steps
    per_epoch: int = getattr(state, "epoch_train_steps", None) or 0  # the state of transformers does not have it
    is_due = bool(interval) and step % interval == 0
    ends_epoch = bool(per_epoch) and step - state.epoch_start_step >= per_epoch
    return bool(is_due or ends_epoch or step == state.max_steps)
