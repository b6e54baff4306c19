"""Adapts optimizers with Megatron-Core's convention, which clip by themselves, to the loop's optimizer interface."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from onstep.distributed.block_norms import norms_of
from onstep.distributed.shards import is_sharded
from onstep.optim.finite_gate import FiniteGate, finite_gate, is_above
from onstep.optim.gradients import ShardedGradients
from onstep.optim.loss_scaler import LossScaler
from onstep.optim.protocol import HasParamGroups, HasState


class MegatronOptimizer(HasParamGroups, HasState, Protocol):
    """Megatron-Core's convention; without `state_dict` and `load_state_dict` it cannot be saved in a checkpoint."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def step(self) -> tuple[bool, Tensor | float | None, Tensor | int | None]:
        """Clip and update: (update_successful, grad_norm, num_zeros)."""


class ForeignOptimizer:
    """An optimizer whose `step()` does everything at once, preceded by Onstep's gate, threshold and loss scale.

    Loss and raw gradients are read once before each `step()`, which waits for the device: what it does cannot be undone
    there. Non-finite values never reach it, nor gradients that overflowed with the `scaler`, which it does not know
    about. The norm and the zeros of a step are those that its `step()` returns.

    Args:
        model: the chunks whose gradients are scaled and watched; shared parameters count once.
        device: the device of losses and gradients.
        scaler: the loss scaler of float16; None does not scale. Its state is not in `state_dict`.
        grad_norm_skip_threshold: steps with a raw gradient norm above this are skipped; None skips none.
        optimizer: the optimizer.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        model: Sequence[nn.Module],
        *,
        device: torch.device,
        scaler: LossScaler | None = None,
        grad_norm_skip_threshold: float | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.gate: FiniteGate = finite_gate(device)
        self.scaler = scaler
        self.grad_norm_skip_threshold = grad_norm_skip_threshold
        self.overflowed = False
        self.grad_norm: Tensor | float | None = None
        """The norm that `step()` returned, or the raw norm above the threshold; None before either."""
        self.num_zeros: Tensor | int | None = None
        """The number of zeros that `step()` returned."""
        self._model, self._device = model, device
        self._params: list[Tensor] = []
        self._sharded: ShardedGradients | None = None
        self._loss: Tensor | None = None
        self._raw_norm: Tensor | None = None
        self._norm_value: float | None = None
        """The same on the host, if it has been read."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def observe_loss(self, loss: Tensor) -> None:
        """Keep `loss` for `prepare`, which checks loss and gradients together."""
        self._loss = loss

    def prepare(self, grad_scale: Tensor | float | None = None, *, needs_norm: bool = True) -> Tensor | None:
        """Scale the gradients and pass them to the gate, unless they overflowed. A `scaler` waits for the device.

        Args:
            grad_scale: a factor that gradients are multiplied by; None for none.
            needs_norm: whether the norm of the gradients is read.

        Returns:
            The L2 norm of the raw gradients over all ranks, 0-d; None if they overflowed, or if neither the caller nor
                the threshold needs it.
        """
        params: list[Tensor] = [*dict.fromkeys(param for chunk in self._model for param in chunk.parameters())]
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            self._survey(params)
        with torch.no_grad():
            if self._sharded is None:
                gradients = [param.grad for param in params if param.grad is not None]
            else:
                gradients = self._sharded.collect()
            if self.scaler is not None:
                grad_scale = (1.0 if grad_scale is None else grad_scale) / self.scaler.scale
            if grad_scale is not None and gradients:
                torch._foreach_mul_(gradients, grad_scale)
            norm = self._global_norm(gradients)
        loss, self._loss = self._loss, None
        self.grad_norm = self.num_zeros = self._raw_norm = self._norm_value = None
        if loss is not None:
            self.gate.observe_loss(loss)
        self.overflowed = False
        if self.scaler is not None and not self.scaler.is_constant:
            self._norm_value, *known = self.gate.read(norm, *([] if loss is None else [loss]))
            self.overflowed = self.scaler.is_overflow(self._norm_value, *known)
        if self.overflowed:  # a lower scale will fix it, so the gate is not closed
            return None
        if gradients or self._sharded is not None:
            self.gate.observe_norm(norm, self._norm_value)
        if needs_norm or self.grad_norm_skip_threshold is not None:
            self._raw_norm = norm
        return self._raw_norm

    def _survey(self, params: list[Tensor]) -> None:
        """Find out once how these parameters are sharded."""
        self._params, self._sharded = params, None
        if is_sharded(params):
            names: dict[Tensor, str] = {
                param: name for chunk in self._model for name, param in chunk.named_parameters()
            }
            self._sharded = ShardedGradients(params, [names[param] for param in params])

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        if self._sharded is not None and self._sharded.kinds.sums.has_others:
            return self._sharded.norm(gradients, self._device)
        if not gradients:
            return torch.zeros((), device=self._device)
        norm: Tensor = torch.stack(norms_of(gradients)).norm()
        return norm

    def read(self, *values: Tensor) -> list[float]:
        """The values of tensors of one element, with one wait for the device, after which `apply` does not wait.

        Args:
            values: tensors of one element on the device.
        """
        if self.grad_norm_skip_threshold is None or self._raw_norm is None or self._norm_value is not None:
            return self.gate.read(*values)
        *known, self._norm_value = self.gate.read(*values, self._raw_norm)
        return known

    def apply(self) -> bool:
        """Step, unless loss or gradients are not finite or their norm is above the threshold. Waits for the device."""
        if self.overflowed:
            return False
        self.read()
        if self.gate.first_bad_step is not None:
            return False
        if is_above(self.grad_norm_skip_threshold, self._raw_norm, self._norm_value):
            self.grad_norm = self._raw_norm
            return False
        is_applied, self.grad_norm, self.num_zeros = self.optimizer.step()
        return bool(is_applied)
