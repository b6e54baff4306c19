"""Steps the server's parameters by averaged pseudo-gradients: what DiLoCo calls the outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from onstep.errors import ConfigError, require

OuterFactory = Callable[[list[Tensor]], Optimizer]
"""Makes the outer optimizer of some parameters; called once for each fragment."""

LEARNING_RATE = 0.7
MOMENTUM = 0.6
"""Less than the 0.9 of Douillard et al. 2023; docs/adr/0073 has the losses of both."""
MOST_LEARNING_RATE = 10.0
"""Ten times what any published run of DiLoCo uses; a rate far above 1 leaves the workers' models behind for good."""


def sgd(lr: float = LEARNING_RATE, momentum: float = MOMENTUM) -> OuterFactory:
    """A factory of SGD, with Nesterov momentum unless it is 0."""
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)


def nesterov_sgd(parameters: list[Tensor]) -> Optimizer:
    """SGD with learning rate 0.7 and Nesterov momentum 0.6, with rounds as without (decision 0073).

    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", section 3.1.
    """
    return sgd()(parameters)


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


def steps_in_pieces(optimizer: Optimizer) -> bool:
    """Whether `SgdPieces` makes the steps of this optimizer."""
    return type(optimizer) is SGD and not any(group.get("fused") for group in optimizer.param_groups)


class SgdPieces:
    """Steps one parameter of a `torch.optim.SGD` piece by piece, to the same bits as `SGD.step`.

    Args:
        parameter: the parameter; contiguous.
        group: of the optimizer, with its rates.
        state: of the parameter in the optimizer, which gets the momentum.
    """

    def __init__(self, parameter: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        self._parameter, self._group = parameter.view(-1), group
        self._is_first = state.get("momentum_buffer") is None
        if self._is_first and group["momentum"]:
            state["momentum_buffer"] = torch.empty_like(parameter)
        self._momentum = state["momentum_buffer"].view(-1) if group["momentum"] else None

    def step(self, start: int, gradient: Tensor) -> None:
        """Step the elements from `start` on by a flat gradient, whose memory is used."""
        piece, group = slice(start, start + gradient.numel()), self._group
        parameter = self._parameter[piece]
        if group["maximize"]:
            gradient.neg_()
        if group["weight_decay"]:
            gradient.add_(parameter, alpha=group["weight_decay"])
        if self._momentum is not None:
            momentum = self._momentum[piece]
            if self._is_first:
                momentum.copy_(gradient)
            else:
                momentum.mul_(group["momentum"]).add_(gradient, alpha=1.0 - group["dampening"])
            gradient = gradient.add_(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        parameter.add_(gradient, alpha=-group["lr"])


def delayed(factory: OuterFactory, buffer_size: int | None, num_workers: int = 1) -> OuterFactory:
    """A factory of `DelayedNesterov` with the learning rate and momentum of another factory's SGD.

    Args:
        factory: makes the other optimizer.
        buffer_size: N; None for the number of workers, if the other is SGD, and else the other optimizer itself.
        num_workers: expected by the server.

    Raises:
        ConfigError: when it is called, if the other makes anything but SGD.
    """

    def make(parameters: list[Tensor]) -> Optimizer:
        plain = factory(parameters)
        if type(plain) is not SGD and buffer_size is None:
            return plain
        if type(plain) is not SGD:
            raise ConfigError(
                f"dn_buffer_size requires an outer optimizer that is torch.optim.SGD, whose lr and momentum it uses, "
                f"got {type(plain).__name__}; pass dn_buffer_size=0 for one step of it at each submission."
            )
        group = plain.param_groups[0]
        return DelayedNesterov(parameters, float(group["lr"]), float(group["momentum"]), buffer_size or num_workers)

    return make


def check_rates(optimizer: Optimizer) -> None:
    """Check the learning rates and momenta of an outer optimizer.

    Raises:
        ConfigError: for one out of range.
    """
    for group in optimizer.param_groups:
        _check(
            group.get("lr"),
            group.get("momentum"),
            "; give another with --outer-lr or --outer-momentum, for a saved run with --change-settings.",
        )


def nesterov_rates(optimizer: Optimizer) -> tuple[float, float]:
    """Learning rate and momentum of SGD with Nesterov momentum or none, whose steps eager workers repeat.

    Raises:
        ConfigError: for any other optimizer.
    """
    group = optimizer.param_groups[0]
    is_plain = (
        type(optimizer) is SGD and len(optimizer.param_groups) == 1 and (group["nesterov"] or not group["momentum"])
    )
    if not is_plain or group["weight_decay"] or group["dampening"] or group["maximize"]:
        raise ConfigError(
            f"eager requires an outer optimizer that is torch.optim.SGD with Nesterov momentum or none, and without "
            f"weight decay, got {type(optimizer).__name__}; pass eager=False (drop --eager)."
        )
    return float(group["lr"]), float(group["momentum"])


def follow_workers(optimizer: Optimizer, before: int, now: int) -> None:
    """Let the asynchronous buffer that is the default of a number of workers be that of another number."""
    for group in optimizer.param_groups:
        if group.get("buffer_size") == before:
            group["buffer_size"] = now


def set_rate(optimizer: Optimizer, lr: float | None = None, momentum: float | None = None) -> None:
    """Change the learning rate or momentum of all groups.

    Raises:
        ConfigError: for a value out of range, or a momentum that the optimizer does not have.
    """
    _check(lr, momentum)
    if momentum is not None and any("momentum" not in group for group in optimizer.param_groups):
        raise ConfigError(f"momentum cannot be set: {type(optimizer).__name__} has none; set lr only.")
    for group in optimizer.param_groups:
        group.update({key: value for key, value in (("lr", lr), ("momentum", momentum)) if value is not None})


def _check(lr: Any, momentum: Any, remedy: str = ".") -> None:
    if lr is not None:
        require(0.0 <= lr <= MOST_LEARNING_RATE, "the outer lr", f"from 0 to {MOST_LEARNING_RATE:g}", lr, remedy)
    if momentum is not None:
        require(0.0 <= momentum < 1.0, "the outer momentum", "in [0, 1)", momentum, remedy)
