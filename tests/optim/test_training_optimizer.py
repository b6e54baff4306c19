"""prepare and apply: bitwise torch's own, gated, and without reads on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep.errors import ConfigError
from onstep.optim import DeviceFiniteGate, LossScaler, TrainingOptimizer
from tests.support.exact_steps import HOST_READS, OpCounter, bits, fill_grads
from tests.support.exact_steps import stack as make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e6], ids=["clipped", "below", "far-above"])
def test_twenty_steps_are_bitwise_those_of_plain_torch(scale: float) -> None:
    plain, ours = make_model(), make_model()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    optimizer = TrainingOptimizer(torch.optim.AdamW(ours.parameters(), lr=1e-2, fused=True), clip_grad=1.0)
    for step in range(20):
        fill_grads(plain, step, scale)
        fill_grads(ours, step, scale)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()
        assert bits(optimizer.prepare()) == bits(norm)
        assert bits(p.grad for p in ours.parameters()) == bits(p.grad for p in plain.parameters())
        assert optimizer.apply() is True
    assert bits(ours.parameters()) == bits(plain.parameters())


def test_a_norm_just_around_the_limit_is_clipped_as_torch_clips() -> None:
    for limit in (9.99, 10.0, 10.000001, 10.01):
        plain, ours = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        plain.weight.grad, ours.weight.grad = torch.full((1, 1), 10.0), torch.full((1, 1), 10.0)
        nn.utils.clip_grad_norm_(plain.parameters(), limit)
        TrainingOptimizer(torch.optim.SGD(ours.parameters()), clip_grad=limit).prepare()
        assert bits(ours.weight.grad) == bits(plain.weight.grad)


@pytest.mark.parametrize("clip_grad", [None, 0.0, 1.0])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_grad_scale_is_scaling_by_hand_and_then_clipping(clip_grad: float | None, as_tensor: bool) -> None:
    by_hand, ours = make_model(torch.float64), make_model(torch.float64)
    fill_grads(by_hand, 0)
    fill_grads(ours, 0)
    factor = 0.37
    for param in by_hand.parameters():
        assert param.grad is not None
        param.grad.mul_(factor)
    expected = nn.utils.clip_grad_norm_(by_hand.parameters(), clip_grad or float("inf"))
    optimizer = TrainingOptimizer(torch.optim.SGD(ours.parameters()), clip_grad=clip_grad)
    norm = optimizer.prepare(torch.tensor(factor, dtype=torch.float64) if as_tensor else factor)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for mine, theirs in zip(ours.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=0)


def test_the_norm_of_a_large_gradient_keeps_its_digits() -> None:
    """torch's own norm is 3e-5 off."""
    model = nn.Linear(2048, 1024)
    fill_grads(model, 0)
    expected = torch.stack([one.grad.double().square().sum() for one in model.parameters() if one.grad is not None])
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters()))
    torch.testing.assert_close(optimizer.prepare(), expected.sum().sqrt().float(), rtol=5e-7, atol=0)


def test_nothing_is_read_on_the_host() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    fill_grads(model, 0)
    loss = torch.tensor(1.0, requires_grad=True)
    with OpCounter() as counter:
        optimizer.gate.begin_step(1)
        optimizer.observe_loss(loss)
        optimizer.prepare(torch.tensor(0.5))
        optimizer.apply()
        optimizer.gate.poll()
    assert "_foreach_norm" in counter.names
    assert HOST_READS.isdisjoint(counter.names)


def test_the_device_gate_reads_nothing_on_the_host_after_the_first_update() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), gate=DeviceFiniteGate(CPU)
    )
    fill_grads(model, 0)
    optimizer.step()
    with OpCounter() as counter:
        optimizer.observe_loss(torch.tensor(1.0, requires_grad=True))
        optimizer.prepare()
        optimizer.apply()
    assert HOST_READS.isdisjoint(counter.names)
    assert "copy_" not in counter.names


def test_the_count_of_reads_sees_an_item() -> None:
    with OpCounter() as counter:
        torch.tensor(1.0).item()
    assert not HOST_READS.isdisjoint(counter.names)


@pytest.mark.parametrize("scale", [1e-3, None])
def test_gradients_that_need_no_scaling_are_not_touched(scale: float | None) -> None:
    model = make_model()
    fill_grads(model, 0, scale or 1.0)
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters()), clip_grad=1.0 if scale else None)
    with OpCounter() as counter:
        optimizer.prepare()
    assert "_foreach_mul_" not in counter.names


def test_scale_and_clip_are_one_multiplication() -> None:
    model = make_model()
    fill_grads(model, 0)
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters()), clip_grad=1.0)
    with OpCounter() as counter:
        optimizer.prepare(torch.tensor(2.0))
    assert counter.names.count("_foreach_mul_") == 1


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
    "adagrad-fused": lambda params: torch.optim.Adagrad(params, lr=1e-2, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
}
GATES: dict[str, Callable[[], Any]] = {"host": lambda: None, "device": lambda: DeviceFiniteGate(CPU)}


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def make_optimizer(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=GATES.values(), ids=GATES.keys())
def make_gate(request: pytest.FixtureRequest) -> Any:
    return request.param


def spoil(model: nn.Module, value: float, place: int = 0) -> None:
    """One element of the gradient at `place` becomes `value`."""
    grad = list(model.parameters())[place].grad
    assert grad is not None
    grad.view(-1)[0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_applied(make_optimizer: Any, make_gate: Any, value: float) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(make_optimizer(model.parameters()), gate=make_gate())
    for step in range(3):
        optimizer.gate.begin_step(step)
        fill_grads(model, step)
        optimizer.prepare()
        optimizer.apply()
    before = bits([model.parameters(), optimizer.state_dict()])
    for step in range(3, 6):  # the later ones are finite: the gate stays closed
        optimizer.gate.begin_step(step)
        fill_grads(model, step)
        if step == 3:
            spoil(model, value)
        optimizer.prepare()
        optimizer.apply()
    assert bits([model.parameters(), optimizer.state_dict()]) == before
    assert optimizer.gate.poll(force=True) == 3
    assert optimizer.apply() is False


def test_a_bad_first_step_leaves_nothing_behind(make_optimizer: Any, make_gate: Any) -> None:
    """Fused SGD would store an uninitialised momentum buffer for a skipped first update."""
    clean, spoiled = make_model(), make_model()
    optimizers = [TrainingOptimizer(make_optimizer(model.parameters()), gate=make_gate()) for model in (clean, spoiled)]
    fill_grads(spoiled, 9)
    spoil(spoiled, float("nan"))
    assert optimizers[1].step()[0] is False
    optimizers[1].gate.reset()
    for model, optimizer in zip((clean, spoiled), optimizers, strict=True):
        for step in range(2):
            fill_grads(model, step)
            assert optimizer.step()[0] is True
    assert bits(spoiled.parameters()) == bits(clean.parameters())


def test_a_loss_that_is_not_finite_closes_the_gate(make_gate: Any) -> None:
    for value, dtype in [(float("nan"), torch.float32), (float("-inf"), torch.float32), (float("inf"), torch.bfloat16)]:
        model = make_model()
        optimizer = TrainingOptimizer(OPTIMIZERS["adamw-fused"](model.parameters()), gate=make_gate())
        before = bits(model.parameters())
        fill_grads(model, 0)
        optimizer.gate.begin_step(4)
        optimizer.observe_loss(torch.tensor(value, dtype=dtype, requires_grad=True))
        optimizer.prepare()
        optimizer.apply()
        assert optimizer.gate.poll(force=True) == 4
        assert bits(model.parameters()) == before


def test_observing_a_loss_leaves_it_fit_for_backward(make_gate: Any) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters()), gate=make_gate())
    root = torch.tensor(2.0, requires_grad=True)
    loss = root.exp()  # whose backward needs the value of the loss itself
    optimizer.observe_loss(loss)
    loss.backward()
    assert optimizer.gate.poll(force=True) is None
    assert root.grad is not None
    assert float(root.grad) == float(loss.detach())


def test_step_is_both_halves_with_the_result_of_megatron() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fill_grads(model, 0)
    is_applied, norm, num_zeros = optimizer.step()
    assert (is_applied, num_zeros) == (True, None)
    assert norm is not None
    assert norm.shape == ()
    fill_grads(model, 1)
    spoil(model, float("nan"))
    assert optimizer.step()[0] is False
    assert optimizer.gate.first_bad_step == 1


def test_low_precision_norms_are_accumulated_in_float32() -> None:
    layer = nn.Linear(257, 257, bias=False, dtype=torch.bfloat16)
    layer.weight.grad = torch.ones_like(layer.weight)
    norm = TrainingOptimizer(torch.optim.SGD(layer.parameters()), clip_grad=None).prepare()
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx(257, rel=1e-4)  # bfloat16 has 256 and 258


def test_parameters_without_gradients_are_left_out() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = bits(model.parameters())
    assert float(optimizer.prepare()) == 0.0
    assert optimizer.apply() is True
    assert bits(model.parameters()) == before
    first = next(model.parameters())
    first.grad = torch.full_like(first, 0.1)
    assert float(optimizer.prepare()) == pytest.approx(0.1 * first.numel() ** 0.5)


def test_it_shows_and_reloads_what_it_wraps() -> None:
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = TrainingOptimizer(inner)
    fill_grads(model, 0)
    optimizer.step()
    assert optimizer.optimizer is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    other = TrainingOptimizer(torch.optim.AdamW(make_model().parameters(), lr=0.3))
    other.load_state_dict(optimizer.state_dict())
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2


def test_zero_grad_drops_or_zeroes_gradients() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters()))
    fill_grads(model, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_a_zero_grad_of_the_users_own_is_called() -> None:
    class Recording(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            super().zero_grad(set_to_none)

    inner = Recording(make_model().parameters())
    TrainingOptimizer(inner).zero_grad()
    assert inner.calls == 1


def test_a_flag_is_taken_back_when_loaded_groups_are_not_fused() -> None:
    model = make_model()
    loaded_from = torch.optim.AdamW(make_model().parameters(), foreach=True)
    optimizer = TrainingOptimizer(OPTIMIZERS["adamw-fused"](model.parameters()), gate=DeviceFiniteGate(CPU))
    optimizer.load_state_dict(loaded_from.state_dict())
    fill_grads(model, 0)
    assert optimizer.step()[0] is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [None, 0.3])
def test_without_a_norm_gradients_and_weights_are_the_same(factor: float | None, dtype: torch.dtype) -> None:
    models = [make_model(dtype), make_model(dtype)]
    for needs_norm, model in zip((True, False), models, strict=True):
        optimizer = TrainingOptimizer(OPTIMIZERS["sgd-fused"](model.parameters()), clip_grad=None)
        for step in range(5):
            fill_grads(model, step)
            norm = optimizer.prepare(factor, needs_norm=needs_norm)
            assert (norm is not None, optimizer.grad_norm is norm) == (needs_norm, True)
            assert optimizer.apply() is True
    first, second = (bits(p.double() for p in model.parameters()) for model in models)
    assert first == second


def test_without_a_norm_none_is_computed_nor_anything_read() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(OPTIMIZERS["adamw-fused"](model.parameters()), clip_grad=None)
    fill_grads(model, 0)
    with OpCounter() as counter:
        optimizer.prepare(needs_norm=False)
        optimizer.apply()
    assert "_foreach_norm" not in counter.names
    assert HOST_READS.isdisjoint(counter.names)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_without_a_norm_what_is_not_finite_is_never_applied(make_optimizer: Any, make_gate: Any, value: float) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(make_optimizer(model.parameters()), gate=make_gate(), clip_grad=None)
    before = bits(model.parameters())
    for step in (4, 5):
        optimizer.gate.begin_step(step)
        fill_grads(model, step)
        if step == 4:
            spoil(model, value)
        optimizer.prepare(0.5, needs_norm=False)
        optimizer.apply()
        assert bits(model.parameters()) == before
    assert optimizer.gate.poll(force=True) == 4
    optimizer.gate.reset()
    optimizer.prepare(needs_norm=False)
    assert optimizer.apply() is True


@pytest.mark.parametrize("place", range(6))
def test_without_a_norm_every_gradient_is_looked_at(make_optimizer: Any, make_gate: Any, place: int) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(make_optimizer(model.parameters()), gate=make_gate(), clip_grad=None)
    before = bits(model.parameters())
    fill_grads(model, 0)
    spoil(model, float("nan"), place)
    optimizer.prepare(needs_norm=False)
    optimizer.apply()
    assert bits(model.parameters()) == before
    assert optimizer.gate.poll(force=True) is not None


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_without_a_norm_a_loss_that_is_not_finite_keeps_the_update_out(
    make_optimizer: Any, make_gate: Any, loss: float
) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(make_optimizer(model.parameters()), gate=make_gate(), clip_grad=None)
    before = bits(model.parameters())
    fill_grads(model, 0)
    optimizer.observe_loss(torch.tensor(loss))
    optimizer.prepare(needs_norm=False)
    optimizer.apply()
    assert bits(model.parameters()) == before
    assert optimizer.gate.poll(force=True) is not None


def test_a_norm_of_an_earlier_step_is_not_taken_for_that_of_this_one() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(OPTIMIZERS["adamw-fused"](model.parameters()), clip_grad=None)
    fill_grads(model, 0)
    assert optimizer.prepare() is not None
    assert optimizer.prepare(needs_norm=False) is None
    assert optimizer.grad_norm is None


@pytest.mark.parametrize("setting", [{"clip_grad": 1.0}, {"grad_norm_skip_threshold": 1e9}, {"scaler": LossScaler()}])
def test_a_norm_that_is_needed_anyway_is_returned(setting: dict[str, Any]) -> None:
    model = make_model()
    optimizer = TrainingOptimizer(OPTIMIZERS["adamw-fused"](model.parameters()), **{"clip_grad": None, **setting})
    fill_grads(model, 0)
    assert optimizer.prepare(needs_norm=False) is not None


def test_a_group_added_to_the_wrapped_optimizer_is_clipped_and_counted() -> None:
    model, late = make_model(), nn.Parameter(torch.ones(3))
    inner = OPTIMIZERS["adamw-fused"](model.parameters())
    optimizer = TrainingOptimizer(inner, log_num_zeros_in_grad=True)
    inner.add_param_group({"params": [late]})
    late.grad = torch.tensor([3.0, 4.0, 0.0])
    assert float(optimizer.prepare()) == 5.0
    assert float(late.grad.norm()) == pytest.approx(1.0)
    assert optimizer.num_zeros is not None
    assert int(optimizer.num_zeros) == 1


def test_impossible_arguments_are_refused() -> None:
    params = list(make_model().parameters())
    with pytest.raises(ConfigError, match=r"clip_grad must be > 0, got -1.0; pass None"):
        TrainingOptimizer(torch.optim.SGD(params), clip_grad=-1.0)
    with pytest.raises(ConfigError, match="LBFGS requires a closure"):
        TrainingOptimizer(torch.optim.LBFGS(params))


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_sharded_parameters_give_a_plain_norm_and_the_same_update() -> None:
    from torch.distributed.fsdp import fully_shard

    plain, sharded = make_model(), make_model()
    fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
    norms = []
    for model in (plain, sharded):
        optimizer = TrainingOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        model(torch.ones(2, 5)).square().sum().mul(100).backward()
        norms.append(optimizer.prepare())
        assert optimizer.apply() is True
    assert type(norms[1]) is Tensor
    assert bits(norms[1]) == bits(norms[0])
    full = [param.full_tensor().detach() for param in sharded.parameters()]  # type: ignore[attr-defined]
    assert bits(full) == bits(plain.parameters())
