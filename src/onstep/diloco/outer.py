"""Steps the server's parameters by averaged pseudo-gradients: what DiLoCo calls the outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from onstep.errors import ConfigError, require

OuterFactory = Callable[[list[Tensor]], Optimizer]
"""Makes the outer optimizer of some parameters; called once for each fragment."""

LEARNING_RATE, MOMENTUM = 0.7, 0.9


def nesterov_sgd(parameters: list[Tensor]) -> Optimizer:
    """SGD with learning rate 0.7 and Nesterov momentum 0.9.

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", section 3.1.
    """
    return SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)


class DelayedNesterov(Optimizer):
    """Nesterov momentum for pseudo-gradients that arrive one at a time, from workers that do not wait for each other.

    Each pseudo-gradient `g` moves the parameters by `lr * g / N` at once. The momentum is updated, with the average of
    the last N, and applied at every N-th only, as N workers in step would do: momentum applied at every arrival would
    be counted N times as often, and diverge. N pseudo-gradients of the same parameters give exactly one step of
    Nesterov's SGD on their average.

    Args:
        parameters: tensors, or groups of them.
        lr: the outer learning rate.
        momentum: beta, in [0, 1).
        buffer_size: N.
        activation: c in [0, 1/N]: the share of the momentum that is applied at each of the other N - 1.

    Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", algorithm 3.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = LEARNING_RATE,
        momentum: float = MOMENTUM,
        buffer_size: int = 1,
        activation: float = 0.0,
    ) -> None:
        require(lr >= 0.0, "lr", ">= 0", lr)
        require(0.0 <= momentum < 1.0, "momentum", "in [0, 1)", momentum)
        require(buffer_size >= 1, "buffer_size", ">= 1", buffer_size)
        require(0.0 <= activation <= 1.0 / buffer_size, "activation", f"in [0, 1/{buffer_size}]", activation)
        defaults = {"lr": lr, "momentum": momentum, "buffer_size": buffer_size, "activation": activation}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the pseudo-gradient in each parameter's `grad`; parameters without one are left as they are."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, size = self.state[parameter], group["buffer_size"]
        if not state:
            state["received"] = 0
            state["sum"] = torch.zeros_like(parameter)
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["received"] += 1
        state["sum"].add_(gradient)
        share = group["activation"]
        if state["received"] % size == 0:
            state["momentum_buffer"].mul_(group["momentum"]).add_(state["sum"], alpha=1.0 / size)
            state["sum"].zero_()
            share = 1.0 - group["activation"] * (size - 1)
        parameter.add_(gradient, alpha=-group["lr"] / size)
        if share:
            parameter.add_(state["momentum_buffer"], alpha=-group["lr"] * share * group["momentum"])


def delayed(factory: OuterFactory, buffer_size: int) -> OuterFactory:
    """A factory of `DelayedNesterov` with the learning rate and momentum of another factory's SGD.

    Raises:
        ConfigError: when it is called, if the other makes anything but SGD.
    """

    def make(parameters: list[Tensor]) -> Optimizer:
        plain = factory(parameters)
        if type(plain) is not SGD:
            raise ConfigError(
                f"dn_buffer_size requires an outer optimizer that is torch.optim.SGD, whose lr and momentum it uses, "
                f"got {type(plain).__name__}; pass dn_buffer_size=0 for one step of it at each submission."
            )
        group = plain.param_groups[0]
        return DelayedNesterov(parameters, float(group["lr"]), float(group["momentum"]), buffer_size)

    return make


def set_rate(optimizer: Optimizer, lr: float | None = None, momentum: float | None = None) -> None:
    """Change the learning rate or momentum of all groups.

    Raises:
        ConfigError: for a value out of range, or a momentum that the optimizer does not have.
    """
    if lr is not None:
        require(0.0 <= lr < float("inf"), "lr", "a finite number >= 0", lr)
    if momentum is not None:
        require(0.0 <= momentum < 1.0, "momentum", "in [0, 1)", momentum)
        if any("momentum" not in group for group in optimizer.param_groups):
            raise ConfigError(f"momentum cannot be set: {type(optimizer).__name__} has none; set lr only.")
    for group in optimizer.param_groups:
        group.update({key: value for key, value in (("lr", lr), ("momentum", momentum)) if value is not None})
