"""The loss scale of float16: when it grows, when it falls, what it skips, and that nobody notices it otherwise."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.config import OptimizerConfig
from onstep.errors import CheckpointError, ConfigError
from onstep.optim import (
    DeviceFiniteGate,
    HostFiniteGate,
    LossScaler,
    TrainingOptimizer,
    build_loss_scaler,
    build_optimizer,
    wrap_optimizer,
)
from tests.support.exact_steps import bits

INFINITY = float("inf")
GATES = {"host": HostFiniteGate, "device": lambda: DeviceFiniteGate(torch.device("cpu"))}


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step, x for one that overflows and . for a clean one."""
    seen = []
    for step in steps:
        scaler.is_overflow(INFINITY if step == "x" else 1.0)
        seen.append(scaler.scale)
    return seen


def test_the_defaults_are_bridges() -> None:
    scaler = build_loss_scaler(OptimizerConfig(), "fp16_mixed")
    assert scaler is not None
    assert (scaler.scale, scaler.min_scale, scaler.window, scaler.hysteresis) == (2.0**32, 1.0, 1000, 2)


def test_float32_is_never_scaled_and_bfloat16_only_by_a_constant() -> None:
    assert build_loss_scaler(OptimizerConfig(loss_scale=8.0), None) is None
    assert build_loss_scaler(OptimizerConfig(), None) is None
    assert build_loss_scaler(OptimizerConfig(), "bf16_mixed") is None
    scaler = build_loss_scaler(OptimizerConfig(loss_scale=8.0), "bf16_mixed")
    assert scaler is not None
    assert scales(scaler, "." * 2000 + "xx") == [8.0] * 2002


def megatron_scales(steps: str, scale: float, least: float, window: int, hysteresis: int) -> list[float]:
    """The scales of Megatron-Core's rule, written down from its description: only growth refills the hysteresis."""
    clean, left, seen = 0, hysteresis, []
    for step in steps:
        if step == "x":
            clean, left = 0, left - 1
            scale = max(scale / 2, least) if left <= 0 else scale
        else:
            clean += 1
            if clean == window:
                clean, left, scale = 0, hysteresis, scale * 2
        seen.append(scale)
    return seen


@pytest.mark.parametrize(("window", "hysteresis"), [(1, 1), (3, 1), (3, 2), (5, 3)])
@pytest.mark.parametrize("seed", range(20))
def test_random_steps_scale_as_megatrons_rule_says(window: int, hysteresis: int, seed: int) -> None:
    generator = random.Random(seed)
    steps = "".join(generator.choice("..x") for _ in range(60))
    scaler = LossScaler(2.0**10, min_scale=2.0**-60, window=window, hysteresis=hysteresis)
    expected = megatron_scales(steps, 2.0**10, 2.0**-60, window, hysteresis)
    assert max(expected) < 2.0**96, "where ours stops growing"
    assert min(expected) > 2.0**-60, "where ours reports an anomaly"
    assert scales(scaler, steps) == expected


def test_the_configuration_reaches_the_scaler() -> None:
    config = OptimizerConfig(initial_loss_scale=64.0, min_loss_scale=16.0, loss_scale_window=3, hysteresis=1)
    scaler = build_loss_scaler(config, "fp16_mixed")
    assert scaler is not None
    assert scales(scaler, "...xxx") == [64, 64, 128, 64, 32, 16]


@pytest.mark.parametrize(
    ("scale", "window", "hysteresis", "steps", "expected"),
    [
        (8.0, 3, 1, "..x...", [8, 8, 4, 4, 4, 8]),  # doubles after a window of clean steps in a row
        (64.0, 4, 2, "xx.x.x", [64, 32, 32, 16, 16, 8]),  # halves with the second overflow and every further one
        (64.0, 3, 2, "x..x...xx", [64, 64, 64, 32, 32, 32, 64, 64, 32]),  # only growth forgives an overflow
    ],
)
def test_steps_scale_as_worked_out_by_hand(
    scale: float, window: int, hysteresis: int, steps: str, expected: list[float]
) -> None:
    assert scales(LossScaler(scale, window=window, hysteresis=hysteresis), steps) == expected


def test_an_overflow_is_one_only_while_the_scale_can_fall() -> None:
    scaler = LossScaler(4.0, min_scale=1.5, window=3, hysteresis=1)
    calls = [scaler.is_overflow(INFINITY) for _ in range(4)]
    assert calls == [True, True, False, False]
    assert scaler.scale == 1.5
    assert scales(scaler, "..x...") == [1.5, 1.5, 1.5, 1.5, 1.5, 3.0], "an anomaly ends a row of clean steps too"


def test_a_constant_scale_never_changes_and_knows_no_overflow() -> None:
    scaler = build_loss_scaler(OptimizerConfig(loss_scale=1000.0, loss_scale_window=2), "fp16_mixed")
    assert scaler is not None
    assert scales(scaler, "....x..") == [1000.0] * 7
    assert scaler.is_overflow(INFINITY) is False


@pytest.mark.parametrize("loss", [math.nan, INFINITY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make_gate", GATES.values(), ids=GATES.keys())
def test_a_loss_that_is_not_finite_is_not_its_business(make_gate: Any, loss: float, dtype: torch.dtype) -> None:
    scaler, gate = LossScaler(64.0, hysteresis=1), make_gate()
    losses = [torch.tensor(value, dtype=dtype, requires_grad=True) for value in (loss, 1.0)]
    assert scaler.is_overflow(math.nan, *gate.read(losses[0])) is False
    assert scaler.state_dict() == LossScaler(64.0, hysteresis=1).state_dict()
    assert scaler.is_overflow(math.nan, *gate.read(losses[1])) is True


def test_growth_ends_where_float32_would() -> None:
    scaler = LossScaler(window=1)
    assert scales(scaler, "." * 100)[-1] == 2.0**96
    assert torch.tensor(scaler.scale).isfinite()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_scale": 0.5}, "got 0.5 with the minimum 1.0"),
        ({"initial_scale": 2.0**100}, r"must start at 2\*\*96 or less"),
        ({"min_scale": 0.0}, "its minimum, which is > 0"),
        ({"window": 0}, "must be >= 1, got 0 and 2"),
        ({"hysteresis": 0}, "must be >= 1, got 1000 and 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossScaler(**settings)


def test_a_loaded_scaler_goes_on_as_the_saved_one_would() -> None:
    steps = "xx..x...xx......"
    for cut in range(len(steps)):
        whole, first, second = (LossScaler(64.0, window=3, hysteresis=2) for _ in range(3))
        expected = scales(whole, steps)
        seen = scales(first, steps[:cut])
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert seen + scales(second, steps[cut:]) == expected
        assert second.state_dict() == whole.state_dict()


def test_a_loaded_state_keeps_to_todays_limits() -> None:
    scaler = LossScaler(64.0, min_scale=16.0, hysteresis=2)
    scaler.load_state_dict({"scale": 2.0, "clean_steps": 5, "hysteresis_left": 7})
    assert scaler.state_dict() == {"scale": 16.0, "clean_steps": 5, "hysteresis_left": 2}
    constant = LossScaler.constant(8.0)
    constant.load_state_dict({"scale": 2.0, "clean_steps": 5, "hysteresis_left": 1})
    assert constant.scale == 8.0


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": math.nan, "clean_steps": 0, "hysteresis_left": 2},
        {"scale": 0.0, "clean_steps": 0, "hysteresis_left": 2},
        {"scale": 2.0**120, "clean_steps": 0, "hysteresis_left": 2},
        {"scale": 4.0, "clean_steps": -1, "hysteresis_left": 2},
        {"scale": 4.0, "clean_steps": 0},
    ],
    ids=str,
)
def test_a_state_that_no_scaler_saved_is_refused(state: dict[str, Any]) -> None:
    scaler = LossScaler(64.0)
    with pytest.raises(CheckpointError, match="The state of a loss scaler must have"):
        scaler.load_state_dict(state)
    assert scaler.scale == 64.0


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The float16-autocast loss of a regression on random rows."""
    generator = torch.Generator().manual_seed(step)
    rows, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    with torch.autocast("cpu", dtype=torch.float16):
        return (model(rows).float() - targets).square().mean()


def spoil(model: nn.Module, step: int) -> None:
    """Let the gradient of some steps overflow, which a float16 run does at random."""
    if step in (30, 31, 77, 120):
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient[0, 0] = INFINITY if step % 2 else -INFINITY


@pytest.mark.parametrize("make_gate", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("fused", [True, False])
def test_two_hundred_steps_are_bitwise_those_of_torchs_grad_scaler(make_gate: Any, fused: bool) -> None:
    """From a scale that overflows by itself, with overflows put in, and with growth; clipped in most steps."""
    theirs, ours = make_model(), make_model()
    settings = {"lr": 1e-3, "weight_decay": 0.1, "fused": fused}
    their_optimizer = torch.optim.AdamW(theirs.parameters(), **settings)
    their_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    scaler = LossScaler(2.0**24, window=20, hysteresis=1)
    inner = torch.optim.AdamW(ours.parameters(), **settings)
    optimizer = TrainingOptimizer(inner, clip_grad=0.5, gate=make_gate(), scaler=scaler)
    num_skipped, seen = 0, set()
    for step in range(200):
        assert scaler.scale == their_scaler.get_scale()
        their_optimizer.zero_grad()
        optimizer.zero_grad()
        their_scaler.scale(loss_of(theirs, step)).backward()
        loss = loss_of(ours, step)
        (loss * scaler.scale).backward()
        spoil(theirs, step)
        spoil(ours, step)
        their_scaler.unscale_(their_optimizer)
        their_norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        before = bits(ours.parameters())
        optimizer.gate.begin_step(step)
        optimizer.observe_loss(loss)
        norm = optimizer.prepare()
        is_overflow = not bool(their_norm.isfinite())
        assert optimizer.overflowed is is_overflow
        if not is_overflow:
            assert bits([norm]) == bits([their_norm])
            assert bits(p.grad for p in ours.parameters()) == bits(p.grad for p in theirs.parameters())
        assert optimizer.apply() is not is_overflow
        assert (bits(ours.parameters()) == before) is is_overflow
        their_scaler.step(their_optimizer)
        their_scaler.update()
        num_skipped += is_overflow
        seen.add(scaler.scale)
        assert bits(ours.parameters()) == bits(theirs.parameters())
    assert num_skipped > 6, "the first steps and the spoiled ones must overflow"
    assert len(seen) > 6, "the scale must have moved"
    assert optimizer.gate.poll(force=True) is None, "an overflow must not close the gate"
    for mine, his in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert bits([inner.state[mine]["exp_avg"]]) == bits([their_optimizer.state[his]["exp_avg"]])


def filled(seed: int, scale: float) -> tuple[nn.Linear, list[Tensor]]:
    """A layer whose gradients are float64 numbers times `scale`, and these numbers."""
    layer, generator = nn.Linear(7, 5), torch.Generator().manual_seed(seed)
    exact = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in layer.parameters()]
    for param, gradient in zip(layer.parameters(), exact, strict=True):
        param.grad = (gradient * scale).float()
    return layer, exact


@pytest.mark.parametrize("clip", [None, 0.3, 100.0])
@pytest.mark.parametrize("scale", [1000.0, 2.0**32, 3e-3])
@pytest.mark.parametrize("factor", [None, 0.375, torch.tensor(7, dtype=torch.float64)], ids=str)
def test_unscaling_and_clipping_are_those_of_float64(clip: float | None, scale: float, factor: Any) -> None:
    layer, exact = filled(3, scale)
    scaler = LossScaler.constant(scale)
    norm = TrainingOptimizer(torch.optim.SGD(layer.parameters()), clip_grad=clip, scaler=scaler).prepare(factor)
    true = [gradient * (1.0 if factor is None else float(factor)) for gradient in exact]
    true_norm = torch.stack([gradient.norm() for gradient in true]).norm()
    share = 1.0 if clip is None else min(1.0, clip / (float(true_norm) + 1e-6))
    torch.testing.assert_close(norm.double(), true_norm, rtol=1e-6, atol=0)
    for param, gradient in zip(layer.parameters(), true, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad.double(), gradient * share, rtol=2e-6, atol=0)


@pytest.mark.parametrize("make_gate", GATES.values(), ids=GATES.keys())
def test_an_overflow_skips_the_update_and_shows_gradients_without_the_scale(make_gate: Any) -> None:
    layer, exact = filled(3, 64.0)
    assert layer.bias.grad is not None
    layer.bias.grad[0] = INFINITY
    before = bits(layer.parameters())
    optimizer = TrainingOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0, fused=True), gate=make_gate(), scaler=LossScaler(64.0)
    )
    assert optimizer.step() == (False, None, None)
    assert bits(layer.parameters()) == before
    assert optimizer.gate.poll(force=True) is None
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad.double(), exact[0], rtol=1e-6, atol=0)
    layer.bias.grad[0] = 1.0
    assert optimizer.step()[0] is True
    assert optimizer.overflowed is False
    assert bits(layer.parameters()) != before


@pytest.mark.parametrize("make_gate", GATES.values(), ids=GATES.keys())
@pytest.mark.parametrize("scaler", [LossScaler(2.0, min_scale=2.0), LossScaler.constant(8.0)], ids=["min", "constant"])
def test_an_overflow_that_no_lower_scale_can_mend_closes_the_gate(make_gate: Any, scaler: LossScaler) -> None:
    layer, _ = filled(3, 1.0)
    assert layer.bias.grad is not None
    layer.bias.grad[0] = INFINITY
    before = bits(layer.parameters())
    optimizer = TrainingOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), gate=make_gate(), scaler=scaler)
    optimizer.gate.begin_step(3)
    optimizer.prepare()
    assert optimizer.overflowed is False
    assert optimizer.apply() is False
    assert optimizer.gate.poll(force=True) == 3
    assert bits(layer.parameters()) == before


@pytest.mark.parametrize("make_gate", GATES.values(), ids=GATES.keys())
def test_a_nan_loss_closes_the_gate_at_any_scale_and_moves_none(make_gate: Any) -> None:
    layer, _ = filled(3, math.nan)
    scaler = LossScaler(2.0**32, hysteresis=1)
    optimizer = TrainingOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), gate=make_gate(), scaler=scaler)
    optimizer.gate.begin_step(5)
    optimizer.observe_loss(torch.tensor(math.nan))
    optimizer.prepare()
    assert optimizer.overflowed is False
    assert optimizer.apply() is False
    assert optimizer.gate.poll(force=True) == 5
    assert scaler.scale == 2.0**32
    optimizer.prepare()
    assert optimizer.overflowed is True, "the loss of one step says nothing of the next"


def overflow(optimizer: TrainingOptimizer, times: int) -> None:
    for _ in range(times):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, INFINITY)
        optimizer.prepare()


def test_the_state_of_the_optimizer_holds_the_scalers() -> None:
    saving = TrainingOptimizer(torch.optim.AdamW(make_model().parameters()), scaler=LossScaler(64.0, hysteresis=2))
    overflow(saving, 3)
    state = saving.state_dict()
    assert state["scaler"] == {"scale": 16.0, "clean_steps": 0, "hysteresis_left": 0}
    loading = TrainingOptimizer(torch.optim.AdamW(make_model().parameters()), scaler=LossScaler(64.0, hysteresis=2))
    loading.load_state_dict(state)
    assert loading.scaler is not None
    assert loading.scaler.state_dict() == state["scaler"]
    assert "scaler" in state, "loading must leave the state as it is"


def test_a_state_without_a_scaler_starts_one_anew_and_without_one_its_state_is_passed_over() -> None:
    plain = TrainingOptimizer(torch.optim.AdamW(make_model().parameters()))
    assert set(plain.state_dict()) == {"state", "param_groups"}
    scaled = TrainingOptimizer(torch.optim.AdamW(make_model().parameters()), scaler=LossScaler(64.0))
    overflow(scaled, 4)
    plain.load_state_dict(scaled.state_dict())
    assert plain.scaler is None
    scaled.load_state_dict(plain.state_dict())
    assert scaled.scaler is not None
    assert scaled.scaler.state_dict() == LossScaler(64.0).state_dict()


def test_float16_weights_are_refused() -> None:
    model = make_model().half()
    with pytest.raises(ConfigError, match="float16 mixed precision requires float32 weights"):
        TrainingOptimizer(torch.optim.SGD(model.parameters()), scaler=LossScaler())
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match=r"model\.float\(\)"):
        optimizer.scaler = LossScaler()
    assert optimizer.scaler is None


def test_the_scale_is_given_as_megatron_gives_it() -> None:
    optimizer = build_optimizer([make_model()], OptimizerConfig(lr=0.1), scaler=LossScaler(64.0))
    assert optimizer.get_loss_scale().tolist() == [64.0]
    plain = build_optimizer([make_model()], OptimizerConfig(lr=0.1))
    assert plain.get_loss_scale().tolist() == [1.0]
    wrapped = wrap_optimizer(torch.optim.SGD(make_model().parameters()), 1.0, scaler=LossScaler(8.0))
    assert isinstance(wrapped, TrainingOptimizer)
    assert wrapped.get_loss_scale().tolist() == [8.0]
