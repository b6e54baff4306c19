"""Defines the interfaces of optimizers and schedulers that the training loop uses."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from onstep.optim.finite_gate import FiniteGate
from onstep.optim.loss_scaler import LossScaler

Groups = list[dict[str, Any]]


class HasParamGroups(Protocol):
    """The part of an optimizer that a scheduler uses."""

    @property
    def param_groups(self) -> Groups:
        """The groups; `lr` and, if present, `weight_decay` are written."""


class HasState(Protocol):
    """Anything with a state that is saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """The state that `load_state_dict` needs to continue."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""


class StepOptimizer(HasParamGroups, HasState, Protocol):
    """An optimizer as the loop drives it: `observe_loss`, `prepare`, and `apply` if the step is admitted."""

    gate: FiniteGate
    """Closes when a loss or a gradient is not finite; `apply` then updates nothing."""
    overflowed: bool
    """Whether the float16 gradients of the last prepared step overflowed, which skips its update."""
    scaler: LossScaler | None
    """The loss scaler; assign it only between two steps."""

    @property
    def grad_norm(self) -> Tensor | float | None:
        """The step's gradient norm to report, before clipping; None if unknown, or not known yet."""

    @property
    def num_zeros(self) -> Tensor | int | None:
        """Number of exact zeros in the step's gradients, if counted."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def observe_loss(self, loss: Tensor) -> None:
        """Close the gate if `loss`, a tensor of one element, the same on all ranks, is not finite."""

    def prepare(self, grad_scale: Tensor | float | None = None, *, needs_norm: bool = True) -> Tensor | None:
        """Scale the gradients and pass them to the gate.

        Args:
            grad_scale: factor > 0 for all gradients; None is 1.
            needs_norm: whether the caller uses the norm; if not, it need not be computed.

        Returns:
            The L2 norm of the scaled gradients before clipping, 0-d on their device; None if it was not needed.
        """

    def read(self, *values: Tensor) -> list[float]:
        """The values of tensors of one element, with one wait for an accelerator, after which `apply` does not wait.

        The gate then knows all that was observed.

        Args:
            values: tensors of one element on the device.
        """

    def apply(self) -> bool:
        """Update the weights, unless the gate is closed or the norm is too large; False if nothing was updated."""


class ParamScheduler(HasState, Protocol):
    """The interface of a scheduler that the training loop uses."""

    def step(self, increment: int) -> None:
        """Advance by `increment` samples; called once after each applied update."""


@runtime_checkable
class ScalesRates(Protocol):
    """A scheduler whose rates can be scaled by a decision of the run."""

    lr_factor: float
    """Multiplies every learning rate; setting it writes the new rates at once."""


@runtime_checkable
class RecallsRates(Protocol):
    """A scheduler that knows the learning rates of the last update, after which it was stepped."""

    def rates_before_last_step(self) -> list[float]:
        """The learning rates before the last `step`, by group."""
