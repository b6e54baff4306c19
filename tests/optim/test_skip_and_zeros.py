"""A step that is too large updates nothing, and exact zeros among gradients are counted."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.errors import ConfigError
from onstep.optim import DeviceFiniteGate, LossScaler, TrainingOptimizer, count_zeros, wrap_optimizer
from tests.support.emulated_device import WaitCounter
from tests.support.exact_steps import HOST_READS, OpCounter

CPU = torch.device("cpu")
GATES = {"host": lambda: None, "device": lambda: DeviceFiniteGate(CPU)}


@pytest.fixture(params=GATES.values(), ids=GATES.keys())
def gate(request: pytest.FixtureRequest) -> Any:
    return request.param()


def layer(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(2, 2, bias=False)
    model.weight.grad = torch.full((2, 2), value)
    return model


def state_of(model: nn.Module, optimizer: TrainingOptimizer) -> Any:
    return [p.detach().clone().tolist() for p in model.parameters()], copy.deepcopy(str(optimizer.state_dict()))


def test_a_step_above_the_threshold_updates_nothing_and_the_next_goes_on(gate: Any) -> None:
    model = layer(1.0)
    optimizer = TrainingOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True), gate=gate, grad_norm_skip_threshold=2.0
    )
    assert optimizer.step()[0] is True, "a norm of just 2 is not above it"
    before = state_of(model, optimizer)
    model.weight.grad = torch.full((2, 2), 1.001)
    is_applied, norm, _ = optimizer.step()
    assert is_applied is False
    assert float(norm) == pytest.approx(2.002)  # type: ignore[arg-type]
    assert state_of(model, optimizer) == before
    model.weight.grad = torch.full((2, 2), 0.9)
    assert optimizer.step()[0] is True
    assert optimizer.gate.poll(force=True) is None, "a large norm is finite"


def test_the_norm_is_that_before_clipping_and_after_scaling() -> None:
    for factor, is_applied in ((1.0, False), (0.1, True)):
        model = layer(5.0)
        optimizer = TrainingOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), clip_grad=1.0, grad_norm_skip_threshold=2.0
        )
        optimizer.prepare(factor)
        assert optimizer.apply() is is_applied


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_the_gates_business(gate: Any, value: float) -> None:
    model = layer(value)
    optimizer = TrainingOptimizer(
        torch.optim.AdamW(model.parameters(), fused=True), gate=gate, grad_norm_skip_threshold=2.0
    )
    before = state_of(model, optimizer)
    assert optimizer.step()[0] is False
    assert state_of(model, optimizer) == before
    assert optimizer.gate.poll(force=True) == 0


def test_with_a_loss_scaler_the_unscaled_norm_is_judged_and_an_overflow_is_none() -> None:
    model = layer(64.0)
    scaler = LossScaler(64.0, hysteresis=1)
    optimizer = TrainingOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler, grad_norm_skip_threshold=3.0
    )
    assert optimizer.step()[0] is True, "2 and not 128"
    model.weight.grad = torch.full((2, 2), 128.0)
    assert optimizer.step()[0] is False
    assert scaler.scale == 64.0, "too large is no overflow"
    model.weight.grad = torch.full((2, 2), math.inf)
    assert optimizer.step() == (False, None, None)
    assert scaler.scale == 32.0


def test_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"grad_norm_skip_threshold must be > 0, got 0.0; pass None"):
        TrainingOptimizer(torch.optim.SGD(layer().parameters()), grad_norm_skip_threshold=0.0)


def test_a_wrapped_optimizer_of_the_users_gets_both() -> None:
    inner = torch.optim.SGD(layer().parameters())
    wrapped = wrap_optimizer(inner, 1.0, grad_norm_skip_threshold=3.0, log_num_zeros_in_grad=True)
    assert isinstance(wrapped, TrainingOptimizer)
    assert (wrapped.grad_norm_skip_threshold, wrapped.log_num_zeros_in_grad) == (3.0, True)


def test_zeros_of_all_gradients_are_counted_as_a_whole_number() -> None:
    model = nn.ParameterDict({"a": torch.ones(3, 4), "b": torch.ones(5), "c": torch.ones(2), "none": torch.ones(9)})
    model["a"].grad = torch.zeros(3, 4)
    model["b"].grad = torch.tensor([0.0, -0.0, math.nan, 1e-45, math.inf])
    model["c"].grad = torch.zeros(2)
    model["c"].shared = True
    count = count_zeros(model.parameters(), CPU)
    assert (count.dtype, count.shape, int(count)) == (torch.int64, (), 14)
    assert int(count_zeros([], CPU)) == 0


def test_zeros_of_a_sparse_gradient_are_all_that_it_does_not_have() -> None:
    table = nn.Embedding(6, 2, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert int(count_zeros(table.parameters(), CPU)) == 8


def test_counting_reads_nothing_and_a_threshold_reads_once() -> None:
    def reads(**options: Any) -> int:
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])
        optimizer = TrainingOptimizer(
            torch.optim.AdamW(model.parameters(), fused=True), gate=DeviceFiniteGate(CPU), **options
        )
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()  # the first update reads the gate's flag
        with OpCounter() as counted, WaitCounter().counting() as counter:
            optimizer.step()
        assert HOST_READS.isdisjoint(counted.names)
        return counter.waits[0]

    assert [reads(), reads(log_num_zeros_in_grad=True), reads(grad_norm_skip_threshold=1e9)] == [0, 0, 1]


def test_step_gives_the_zeros_where_they_are_asked_for() -> None:
    model = layer(0.0)
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), log_num_zeros_in_grad=True)
    zeros = optimizer.step()[2]
    assert isinstance(zeros, Tensor)
    assert int(zeros) == 4
    optimizer.log_num_zeros_in_grad = False
    assert TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()[2] is None
