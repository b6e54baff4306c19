"""An optimizer of Megatron-Core's convention: what stands before its `step()`, and what comes back from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.config import OptimizerConfig
from onstep.errors import ConfigError
from onstep.optim import (
    ForeignOptimizer,
    LossScaler,
    OptimizerParamScheduler,
    ScalesRates,
    StepOptimizer,
    TorchSchedulerAdapter,
    TrainingOptimizer,
    as_step_optimizer,
)

CPU = torch.device("cpu")
GOOD_LOSS = torch.tensor(1.0)


class MegatronStyle:
    """Counts its steps; reports a norm and zeros of its own."""

    def __init__(self, model: nn.Module, is_applied: Any = True) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": 0.5}]
        self.is_applied = is_applied
        self.seen: list[list[float]] = []

    def zero_grad(self) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None

    def step(self) -> tuple[bool, Tensor | float | None, Tensor | int | None]:
        self.seen.append([param.grad.abs().max().item() for param in self.param_groups[0]["params"]])
        return self.is_applied, 0.25, 7

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def layer(value: float) -> nn.Linear:
    """Four gradients of `value`: their norm is twice that."""
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.full((2, 2), value)
    return model


def wrapped(model: nn.Module, **settings: Any) -> tuple[ForeignOptimizer, MegatronStyle]:
    inner = MegatronStyle(model)
    return ForeignOptimizer(inner, [model, model], device=CPU, **settings), inner


def one_step(optimizer: StepOptimizer, factor: float | None = None, loss: Tensor = GOOD_LOSS) -> bool:
    optimizer.observe_loss(loss)
    optimizer.prepare(factor, needs_norm=False)
    return optimizer.apply()


def test_it_gets_scaled_raw_gradients_and_its_own_norm_and_zeros_come_back() -> None:
    optimizer, inner = wrapped(layer(8.0))
    optimizer.observe_loss(GOOD_LOSS)
    norm = optimizer.prepare(0.5)
    assert norm is not None
    assert (norm.item(), optimizer.grad_norm, optimizer.num_zeros) == (8.0, None, None), "nothing of its own as yet"
    assert optimizer.apply() is True
    assert inner.seen == [[4.0]], "a shared parameter is scaled once"
    assert (optimizer.grad_norm, optimizer.num_zeros) == (0.25, 7)
    assert optimizer.prepare(torch.tensor(0.5), needs_norm=False) is None
    assert (optimizer.grad_norm, optimizer.num_zeros) == (None, None)
    assert optimizer.apply() is True
    assert inner.seen == [[4.0], [2.0]]


def test_an_update_that_it_refuses_is_not_applied() -> None:
    optimizer, inner = wrapped(layer(1.0))
    inner.is_applied = 0
    assert one_step(optimizer) is False
    assert optimizer.grad_norm == 0.25


@pytest.mark.parametrize(("value", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)])
def test_what_is_not_finite_is_never_handed_over_until_the_gate_is_reset(value: float, loss: float) -> None:
    model = layer(value)
    optimizer, inner = wrapped(model)
    optimizer.gate.begin_step(3)
    assert one_step(optimizer, loss=torch.tensor(loss)) is False
    assert optimizer.gate.first_bad_step == 3
    assert (optimizer.grad_norm, optimizer.num_zeros, optimizer.overflowed) == (None, None, False)
    model.weight.grad = torch.ones(2, 2)
    assert one_step(optimizer) is False
    assert inner.seen == []
    optimizer.gate.reset()
    assert one_step(optimizer) is True


def test_without_gradients_the_loss_alone_is_judged() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer, inner = wrapped(model)
    inner.param_groups[0]["params"] = []
    assert one_step(optimizer) is True
    norm = optimizer.prepare()
    assert norm is not None
    assert norm.item() == 0.0
    assert one_step(optimizer, loss=torch.tensor(math.nan)) is False


def test_a_norm_above_the_threshold_is_reported_and_not_handed_over() -> None:
    model = layer(1.0)
    optimizer, inner = wrapped(model, grad_norm_skip_threshold=2.0)
    assert one_step(optimizer) is True, "2 is not above 2"
    model.weight.grad = torch.full((2, 2), 1.5)
    assert one_step(optimizer) is False
    assert isinstance(optimizer.grad_norm, Tensor)
    assert (optimizer.grad_norm.item(), optimizer.num_zeros) == (3.0, None)
    assert len(inner.seen) == 1
    assert optimizer.gate.first_bad_step is None


def test_float16_gradients_are_unscaled_and_an_overflow_is_skipped_without_the_gate() -> None:
    model = layer(64.0)
    scaler = LossScaler(64.0, hysteresis=1)
    optimizer, inner = wrapped(model, scaler=scaler)
    assert one_step(optimizer, 0.5) is True
    assert inner.seen == [[0.5]]
    model.weight.grad = torch.full((2, 2), math.inf)
    optimizer.observe_loss(GOOD_LOSS)
    assert optimizer.prepare() is None
    assert (optimizer.overflowed, optimizer.apply(), scaler.scale) == (True, False, 32.0)
    assert optimizer.gate.first_bad_step is None
    model.weight.grad = torch.full((2, 2), math.inf)
    assert one_step(optimizer, loss=torch.tensor(math.nan)) is False
    assert optimizer.gate.first_bad_step == 0, "a loss that is not finite is no overflow"
    assert len(inner.seen) == 1


def test_groups_state_and_zero_grad_are_its_own() -> None:
    model = layer(1.0)
    optimizer, inner = wrapped(model)
    one_step(optimizer)
    other, other_inner = wrapped(layer(1.0))
    other.load_state_dict(optimizer.state_dict())
    assert other_inner.seen == [[1.0]]
    assert optimizer.param_groups is inner.param_groups
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_every_optimizer_becomes_one_that_the_loop_drives() -> None:
    model, scaler = layer(1.0), LossScaler(4.0)
    config = OptimizerConfig(clip_grad=0.5, grad_norm_skip_threshold=9.0)

    def made(optimizer: Any) -> TrainingOptimizer | ForeignOptimizer:
        return as_step_optimizer(optimizer, [model], config, device=CPU, scaler=scaler)

    foreign = made(MegatronStyle(model))
    assert isinstance(foreign, ForeignOptimizer)
    assert (foreign.scaler, foreign.grad_norm_skip_threshold) == (scaler, 9.0)
    assert made(foreign) is foreign
    plain = made(torch.optim.SGD(model.parameters()))
    assert isinstance(plain, TrainingOptimizer)
    assert (plain.scaler, plain.clip_grad, plain.grad_norm_skip_threshold) == (scaler, 0.5, 9.0)
    own = TrainingOptimizer(torch.optim.SGD(model.parameters()), clip_grad=2.0, scaler=LossScaler(2.0))
    assert made(own) is own
    assert own.scaler is not scaler
    with pytest.raises(ConfigError, match=r"must have a step\(\) method, got object"):
        made(object())


def test_only_a_scheduler_that_scales_rates_says_so() -> None:
    inner = torch.optim.SGD(layer(1.0).parameters(), lr=0.1)
    settings: dict[str, Any] = dict.fromkeys(("init_lr", "start_wd", "end_wd", "lr_warmup_steps"), 0.0)
    ours = OptimizerParamScheduler(
        inner, max_lr=0.1, min_lr=0.0, lr_decay_steps=9, lr_decay_style="linear", wd_incr_steps=9,
        wd_incr_style="constant", **settings,
    )  # fmt: skip
    assert isinstance(ours, ScalesRates)
    assert not isinstance(TorchSchedulerAdapter(torch.optim.lr_scheduler.StepLR(inner, 1)), ScalesRates)
