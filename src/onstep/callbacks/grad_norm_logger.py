"""Records the gradient norm of each parameter, at every evaluation, in `gradient_norms.json`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from onstep.events import TrainerCallback
from onstep.metrics.json_log_writer import JsonLogWriter, logging_dir_of
from onstep.metrics.norm_meters import GradientMeter

logger: logging.Logger = logging.getLogger(__name__)


class GradNormLogger(TrainerCallback):
    """Appends ``{"grad_norms": {<parameter>: <L2 norm>}}`` to ``<args.logging_dir>/gradient_norms.json``.

    There is one record for each evaluated step: of the gradients of that step's update, as the optimizer got them, so
    after clipping and averaged over ranks. `global_step` and `epoch` are those of the evaluation. Parameters without a
    gradient are left out, a tied parameter stands under its first name.

    Only evaluated steps cost anything. Where the evaluation is foreseen (every `eval_steps`, the last step of an epoch
    or of the run) the norms are computed right before the update, without waiting for the device; where a callback asks
    for it after the update, when the evaluation begins, from the gradients that are still there, which no optimizer of
    torch changes. They are read in one copy off the device. Of sharded parameters (FSDP2, tensor parallelism) the norms
    are those of the whole tensors.

    The callback's state holds the norms measured last, so that a run that is stopped in an evaluation records them when
    it continues. The file is continued, cut and kept as `JsonLogger` does it.

    With an optimizer that updates inside the backward pass (`args.fuse_optim_with_backward`) there are no gradients to
    see; the callback says so and records nothing.
    """

    def __init__(self) -> None:
        self._writer = JsonLogWriter("gradient_norms.json")
        self._meter = GradientMeter(self.name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the file, cut to the step that training continues from."""
        folder = logging_dir_of(args)
        if _is_fused(args):
            logger.warning(
                "%s records nothing: with fuse_optim_with_backward the gradients are gone before they can be measured",
                self.name,
            )
        elif state.is_world_process_zero and folder is not None:
            self._writer.open(folder, state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the gradients of a step that will be evaluated, without waiting for the device."""
        if logging_dir_of(args) is not None and not _is_fused(args):
            self._meter.before_update(kwargs["model"], state.global_step + 1, _is_foreseen(state))

    def on_eval_start(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the gradients of a step whose evaluation was not foreseen."""
        if logging_dir_of(args) is not None and not _is_fused(args):
            self._meter.before_evaluation(kwargs["model"], state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the norms of the step that is evaluated. Collective where parameters are sharded."""
        folder = logging_dir_of(args)
        if folder is None or _is_fused(args):
            return
        norms = self._meter.read(kwargs["model"], state.global_step, state.is_world_process_zero)
        if norms and state.is_world_process_zero:
            self._writer.reopen(folder)
            if self._writer.last_step != state.global_step:
                self._writer.write_record(state.global_step, state.epoch, {"grad_norms": norms})

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the file; a later evaluation opens it again."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the file stands, and this rank's norms of the last step."""
        return {"writer": self._writer.state_dict(), "last": self._meter.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's file when training begins; while training, go back to the checkpoint at once."""
        self._writer.load_state_dict(state_dict["writer"])
        self._meter.load_state_dict(state_dict["last"])


def _is_foreseen(state: Any) -> bool:
    """Whether the step that is going on is likely to be evaluated."""
    step, interval = state.global_step + 1, state.eval_steps
    per_epoch = getattr(state, "epoch_train_steps", None)  # the state of transformers does not have it
    is_due = bool(interval) and step % interval == 0
    ends_epoch = bool(per_epoch) and step - state.epoch_start_step >= per_epoch
    return bool(is_due or ends_epoch or step == state.max_steps)


def _is_fused(args: Any) -> bool:
    return bool(getattr(args, "fuse_optim_with_backward", False))
