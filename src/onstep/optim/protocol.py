"""What the training loop asks of optimizers and schedulers."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from onstep.optim.finite_gate import FiniteGate
from onstep.optim.loss_scaler import LossScaler

Groups = list[dict[str, Any]]


class HasParamGroups(Protocol):
    """An optimizer, as far as a scheduler needs one."""

    @property
    def param_groups(self) -> Groups:
        """The groups; `lr` and, where there is one, `weight_decay` are written."""


class HasState(Protocol):
    """Anything with a state that checkpoints hold."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""


class StepOptimizer(HasParamGroups, HasState, Protocol):
    """An optimizer as the loop drives it: `observe_loss`, `prepare`, and `apply` where the step is admitted."""

    gate: FiniteGate
    """What closes when a loss or a gradient is not finite; `apply` then updates nothing."""
    overflowed: bool
    """Whether the float16 gradients of the step that was prepared last overflowed, which skips its update."""
    scaler: LossScaler | None
    """What the loss must be scaled by; assigning is for between two steps."""

    @property
    def grad_norm(self) -> Tensor | float | None:
        """The gradient norm of the step to report, before clipping; None where it is not known, or not yet."""

    @property
    def num_zeros(self) -> Tensor | int | None:
        """Exact zeros among the gradients of the step, where they are counted."""

    def zero_grad(self) -> None:
        """Drop the gradients."""

    def observe_loss(self, loss: Tensor) -> None:
        """Close the gate if `loss`, a tensor of one element, the same on all ranks, is not finite."""

    def prepare(self, grad_scale: Tensor | float | None = None, *, needs_norm: bool = True) -> Tensor | None:
        """Scale the gradients and show them to the gate.

        Args:
            grad_scale: factor > 0 on all gradients.
            needs_norm: whether the caller uses the norm; without, it may be spared.

        Returns:
            The L2 norm of the scaled gradients before clipping, 0-d on their device; None where it was not needed.
        """

    def apply(self) -> bool:
        """Update the weights, unless the gate is closed or the norm is too large; False if nothing was updated."""


class ParamScheduler(HasState, Protocol):
    """What the training loop asks of a scheduler."""

    def step(self, increment: int) -> None:
        """Move on by `increment` samples; called once after each update that was applied."""


@runtime_checkable
class ScalesRates(Protocol):
    """A scheduler whose rates a decision of the run can scale."""

    lr_factor: float
    """Multiplies every learning rate; setting it writes the new rates at once."""
