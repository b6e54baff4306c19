"""What only an accelerator can show: no waiting in a clean step, gating on the device, copies that arrive in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onstep.optim import DeviceFiniteGate, MuonWithAdamW, OptimizerParamScheduler, TrainingOptimizer, finite_gate
from tests.support.exact_steps import bits, stack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SLOW_CYCLES = 20_000_000
"""About 10 ms of a GPU's clock: enough for the host to run ahead."""

FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adam-fused-amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, fused=True),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "sgd-fused-plain": lambda params: torch.optim.SGD(params, lr=1e-2, fused=True),
}
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw-capturable": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2).cuda(), capturable=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "adamw-as-scripts-write-it": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd-as-scripts-write-it": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "muon": lambda params: muon(list(params)),
}
EVERY = FUSED | OTHERS


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    others = torch.optim.AdamW([one for one in params if one.ndim != 2], lr=1e-2, fused=True)
    return MuonWithAdamW(torch.optim.Muon([one for one in params if one.ndim == 2], lr=1e-2), others)


def make_model() -> nn.Module:
    return stack().cuda()


def fill_grads(model: nn.Module, seed: int) -> None:
    """Random gradients, made on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator, device="cuda")


def spoil(model: nn.Module, value: float) -> None:
    """One gradient element becomes `value`, without the host waiting."""
    grad = next(model.parameters()).grad
    assert grad is not None
    grad[0, 0].fill_(value)


@pytest.fixture
def waiting_is_an_error() -> Iterator[Callable[[], None]]:
    """Call it to make every synchronising operator of torch raise until the test ends."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_twenty_steps_are_bitwise_those_of_plain_torch() -> None:
    plain, ours = make_model(), make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    optimizer = TrainingOptimizer(torch.optim.AdamW(ours.parameters(), lr=1e-2, fused=True))
    for step in range(20):
        fill_grads(plain, step)
        fill_grads(ours, step)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        assert bits(optimizer.prepare()) == bits(norm)
        optimizer.apply()
    assert bits(ours.parameters()) == bits(plain.parameters())


@pytest.mark.parametrize("make_optimizer", EVERY.values(), ids=EVERY.keys())
def test_clean_steps_never_wait(make_optimizer: Any, waiting_is_an_error: Callable[[], None]) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(make_optimizer(model.parameters()))
    loss, scale = torch.tensor(1.0, requires_grad=True).cuda(), torch.tensor(0.5).cuda()
    fill_grads(model, 0)
    optimizer.step()
    waiting_is_an_error()
    for step in range(1, 14):
        optimizer.gate.begin_step(step)
        fill_grads(model, step)
        optimizer.observe_loss(loss)
        optimizer.prepare(scale if step % 2 else 0.5)
        assert optimizer.apply() is True
        assert optimizer.gate.poll() is None


def test_waiting_is_noticed(waiting_is_an_error: Callable[[], None]) -> None:
    norm = torch.ones((), device="cuda")
    waiting_is_an_error()
    with pytest.raises(RuntimeError, match="synchroniz"):
        norm.item()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("make_optimizer", EVERY.values(), ids=EVERY.keys())
def test_what_is_not_finite_is_never_applied(make_optimizer: Any, value: float) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(make_optimizer(model.parameters()))
    for step in range(3):
        optimizer.gate.begin_step(step)
        fill_grads(model, step)
        optimizer.prepare()
        assert optimizer.apply() is True
    before = bits(model.parameters()), bits(optimizer.state_dict())
    for step in range(3, 6):
        optimizer.gate.begin_step(step)
        fill_grads(model, step)
        if step == 3:
            spoil(model, value)
        optimizer.prepare()
        optimizer.apply()
    assert (bits(model.parameters()), bits(optimizer.state_dict())) == before
    assert optimizer.gate.poll(force=True) == 3
    assert optimizer.apply() is False


@pytest.mark.parametrize("make_optimizer", EVERY.values(), ids=EVERY.keys())
def test_a_bad_first_step_leaves_nothing_behind(make_optimizer: Any) -> None:
    clean, spoiled = make_model(), make_model()
    optimizers = [TrainingOptimizer(make_optimizer(model.parameters())) for model in (clean, spoiled)]
    fill_grads(spoiled, 9)
    spoil(spoiled, float("nan"))
    assert optimizers[1].step()[0] is False
    optimizers[1].gate.reset()
    for model, optimizer in zip((clean, spoiled), optimizers, strict=True):
        for step in range(2):
            fill_grads(model, step)
            assert optimizer.step()[0] is True
    assert bits(spoiled.parameters()) == bits(clean.parameters())


@pytest.mark.parametrize("bad_step", range(1, 12))
def test_the_host_learns_at_most_ten_steps_late_although_it_runs_ahead(bad_step: int) -> None:
    gate = finite_gate(torch.device("cuda"))
    norm, bad_norm = torch.ones((), device="cuda"), torch.full((), float("nan"), device="cuda")
    gate.observe_norm(norm)
    assert gate.poll(force=True) is None
    for step in range(1, bad_step + 11):
        torch.cuda._sleep(SLOW_CYCLES)
        gate.begin_step(step)
        gate.observe_norm(bad_norm if step == bad_step else norm)
        if gate.poll() is not None:
            break
    assert gate.first_bad_step == bad_step


def test_a_copy_under_way_is_forgotten_by_a_reset() -> None:
    gate = DeviceFiniteGate(torch.device("cuda"))
    torch.cuda._sleep(SLOW_CYCLES)
    for step in range(5):
        gate.begin_step(step)
        gate.observe_norm(torch.full((), float("nan"), device="cuda"))
        gate.poll()
    gate.reset()
    assert gate.poll(force=True) is None


def test_a_loss_that_is_not_finite_closes_the_gate() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(FUSED["adamw-fused"](model.parameters()))
    fill_grads(model, 0)
    optimizer.step()
    before = bits(model.parameters())
    optimizer.gate.begin_step(4)
    fill_grads(model, 1)
    optimizer.observe_loss(torch.tensor(float("inf"), dtype=torch.bfloat16, device="cuda"))
    optimizer.prepare()
    optimizer.apply()
    assert optimizer.gate.poll(force=True) == 4
    assert bits(model.parameters()) == before


@pytest.mark.parametrize("cpu_first", [True, False])
def test_parameters_on_two_devices_have_one_norm_and_one_gate(cpu_first: bool) -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="cuda"))]
    ordered = params if cpu_first else params[::-1]
    optimizer = TrainingOptimizer(torch.optim.AdamW(ordered, lr=0.1, fused=True), clip_grad=2.5)
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0], device="cuda")
    assert float(optimizer.prepare()) == 5.0
    assert float(params[0].grad[0]) == pytest.approx(1.5, rel=1e-6)
    assert float(params[1].grad[1]) == pytest.approx(2.0, rel=1e-6)
    assert optimizer.apply() is True
    before = bits(params)
    params[1].grad.fill_(float("nan"))
    optimizer.prepare()
    assert optimizer.apply() is False
    assert bits(params) == before


def test_a_learning_rate_on_the_device_is_written_in_place_without_waiting(
    waiting_is_an_error: Callable[[], None],
) -> None:
    rate = torch.tensor(7.0).cuda()
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2).cuda())], lr=rate, capturable=True)
    scheduler = OptimizerParamScheduler(
        TrainingOptimizer(optimizer),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    waiting_is_an_error()
    scheduler.step(75)
    torch.cuda.set_sync_debug_mode("default")
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


@pytest.mark.parametrize("clip_grad", [None, 1.0])
@pytest.mark.parametrize("make_optimizer", EVERY.values(), ids=EVERY.keys())
def test_losses_and_gradients_in_bfloat16_are_checked(make_optimizer: Any, clip_grad: float | None) -> None:
    model = make_model().bfloat16()
    optimizer = TrainingOptimizer(make_optimizer(model.parameters()), clip_grad=clip_grad)
    for step in range(4):
        optimizer.gate.begin_step(step)
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        if step == 3:
            spoil(model, float("nan"))
        optimizer.observe_loss(torch.tensor(1.0, dtype=torch.bfloat16, device="cuda", requires_grad=True))
        optimizer.prepare(needs_norm=False)
        before = [param.clone() for param in model.parameters()]
        optimizer.apply()
        is_same = [torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
        assert all(is_same) if step == 3 else not any(is_same)
    assert optimizer.gate.poll(force=True) == 3


@pytest.mark.parametrize("make_optimizer", OTHERS.values(), ids=OTHERS.keys())
def test_counters_on_the_host_are_those_of_the_last_applied_update(make_optimizer: Any) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(make_optimizer(model.parameters()))
    for step in range(3):
        optimizer.gate.begin_step(step)
        fill_grads(model, step)
        optimizer.step()
    before = bits(optimizer.state_dict())
    for step in range(3, 20):
        optimizer.gate.begin_step(step)
        fill_grads(model, step)
        spoil(model, float("nan"))
        optimizer.prepare()
        if not optimizer.apply():
            break
        optimizer.gate.poll()
    assert optimizer.gate.first_bad_step == 3
    assert bits(optimizer.optimizer.state_dict()) == before


def test_what_the_policies_need_is_read_at_once(waiting_is_an_error: Callable[[], None]) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(FUSED["adamw-fused"](model.parameters()), grad_norm_skip_threshold=1e9)
    fill_grads(model, 0)
    optimizer.step()
    fill_grads(model, 1)
    optimizer.observe_loss(torch.ones((), device="cuda"))
    norm = optimizer.prepare()
    assert norm is not None
    known = optimizer.read(torch.full((), 2.5, device="cuda"), norm)
    waiting_is_an_error()
    assert known[0] == 2.5
    assert optimizer.apply() is True
