"""The tuple that Megatron Bridge's `train_step` returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from onstep.training.losses import Weight
from onstep.training.run import Run
from onstep.training.step import LastStep, Step


class TrainStepResult(NamedTuple):
    """What `train_step` returns, in Megatron Bridge's order."""

    loss_dict: dict[str, Tensor]
    """Reduced losses as 0-d device tensors."""
    skipped_iter: int
    """1 where the update was not applied."""
    should_checkpoint: bool
    should_exit: bool
    exit_code: int
    grad_norm: Weight | None
    """Global L2 norm before clipping; a device tensor of our optimizers."""
    num_zeros_in_grad: Tensor | int | None
    """Exact zeros among the gradients, where they are counted; an int64 device tensor of our optimizers."""

    def with_max_attention_logit(self, global_state: Run) -> tuple[Any, ...]:
        """The 8 values that newer versions of Megatron Bridge return: these 7 and the largest attention logit of the
        step, a device tensor, or None unless `model.log_max_attention_logit`."""
        step = global_state.features.room(LastStep).step
        return (*self, None if step is None else step.max_attention_logit)

    @classmethod
    def of(cls, step: Step) -> TrainStepResult:
        """The result of a step of the loop."""
        return cls(step.loss_dict, int(not step.applied), False, False, 0, step.grad_norm, step.num_zeros)
