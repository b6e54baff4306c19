"""The outer optimizers against the published formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam

from onstep.diloco.outer import DelayedNesterov, delayed, nesterov_sgd, set_rate
from onstep.errors import ConfigError


def _gradients(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(number)]


def _apply(optimizer: torch.optim.Optimizer, parameter: Tensor, gradients: list[Tensor]) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


def test_a_full_buffer_of_delayed_nesterov_is_one_nesterov_step_on_the_average() -> None:
    gradients = _gradients(12)
    one, other = (torch.ones(4, dtype=torch.float64) for _ in range(2))
    _apply(DelayedNesterov([one], lr=0.7, momentum=0.9, buffer_size=3), one, gradients)
    averages = [torch.stack(gradients[start : start + 3]).mean(0) for start in range(0, 12, 3)]
    _apply(SGD([other], lr=0.7, momentum=0.9, nesterov=True), other, averages)
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_between_two_momentum_updates_a_submission_moves_by_its_share_alone() -> None:
    parameter = torch.zeros(4, dtype=torch.float64)
    (gradient,) = _gradients(1)
    _apply(DelayedNesterov([parameter], lr=0.7, momentum=0.9, buffer_size=4), parameter, [gradient])
    assert torch.allclose(parameter, -0.7 * gradient / 4, rtol=0, atol=1e-15)


def test_delayed_nesterov_of_one_is_nesterov() -> None:
    gradients = _gradients(5)
    one, other = (torch.ones(4, dtype=torch.float64) for _ in range(2))
    _apply(delayed(nesterov_sgd, 1)([one]), one, gradients)
    _apply(nesterov_sgd([other]), other, gradients)
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_activation_spreads_the_momentum_over_the_buffer() -> None:
    # Algorithm 3 of the paper, written out.
    gradients, beta, rate, number, share = _gradients(6), 0.9, 0.7, 3, 0.2
    theta, momentum, total = (torch.zeros(4, dtype=torch.float64) for _ in range(3))
    for index, gradient in enumerate(gradients):
        total = total + gradient
        if (index + 1) % number == 0:
            momentum = beta * momentum + total / number
            theta = theta - rate * ((1 - share * number + share) * beta * momentum + gradient / number)
            total = torch.zeros(4, dtype=torch.float64)
        else:
            theta = theta - rate * (share * beta * momentum + gradient / number)
    parameter = torch.zeros(4, dtype=torch.float64)
    optimizer = DelayedNesterov([parameter], rate, beta, number, share)
    _apply(optimizer, parameter, gradients)
    assert torch.allclose(parameter, theta, rtol=0, atol=1e-12)


def test_the_buffer_survives_a_restart() -> None:
    gradients = _gradients(7)
    through, first, second = (torch.ones(4, dtype=torch.float64) for _ in range(3))
    _apply(DelayedNesterov([through], buffer_size=3), through, gradients)
    before = DelayedNesterov([first], buffer_size=3)
    _apply(before, first, gradients[:4])
    second.copy_(first)
    after = DelayedNesterov([second], buffer_size=3)
    after.load_state_dict(before.state_dict())
    _apply(after, second, gradients[4:])
    assert torch.equal(through, second)


def test_delayed_nesterov_refuses_an_optimizer_whose_momentum_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="Adam"):
        delayed(Adam, 4)([torch.zeros(1)])


@pytest.mark.parametrize(("lr", "momentum"), [(-1.0, None), (float("nan"), None), (None, 1.0)])
def test_rates_out_of_range_are_refused_and_change_nothing(lr: float | None, momentum: float | None) -> None:
    optimizer = nesterov_sgd([torch.zeros(1)])
    with pytest.raises(ConfigError):
        set_rate(optimizer, lr, momentum)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.7, 0.6)
