"""bfloat16 weights: updates in float32 with master weights, and rounding without them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.config import OptimizerConfig
from onstep.errors import ConfigError
from onstep.optim import DeviceFiniteGate, TrainingOptimizer, build_optimizer, low_precision
from onstep.optim.rounding import generator_of, join_remainder, round_stochastically, split_remainder
from tests.support.exact_steps import bits

PURE: dict[str, Any] = {"main_params_dtype": "bfloat16"}
CPU = torch.device("cpu")


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).bfloat16().to(dtype)


def built(module: nn.Module, **options: Any) -> TrainingOptimizer:
    given = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": None, "params_dtype": "bfloat16", **options}
    return build_optimizer([module], OptimizerConfig(**given), seed=3)


def fill(module: nn.Module, seed: int) -> None:
    """Gradients that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param.dtype)


def stepped(module: nn.Module, optimizer: TrainingOptimizer, steps: int = 6, first: int = 0) -> nn.Module:
    for seed in range(first, first + steps):
        fill(module, seed)
        optimizer.step()
    return module


def masters(module: nn.Module, optimizer: TrainingOptimizer) -> list[Tensor]:
    found = [param.detach().float() for param in module.parameters()]
    for value, param in zip(found, module.parameters(), strict=True):
        join_remainder(value, optimizer.state[param]["remainder"].int())
    return found


@pytest.mark.parametrize("piece", [10, 2**21])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam"},
        {"optimizer": "sgd"},
        {"optimizer": "muon"},
        {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"},
    ],
)
def test_master_weights_are_those_of_float32(
    options: dict[str, Any], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_precision, "PIECE_ELEMENTS", piece)
    exact, low = model(torch.float32), model()
    stepped(exact, built(exact, params_dtype="float32", **options))
    optimizer = built(low, **options)
    stepped(low, optimizer)
    for param, value, master in zip(low.parameters(), exact.parameters(), masters(low, optimizer), strict=True):
        torch.testing.assert_close(master, value.detach(), rtol=1e-6, atol=1e-7)  # another order of vector lanes
        assert torch.equal(param, master.bfloat16())
    kinds = {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert kinds == {torch.float32, torch.int16}


def test_stochastic_rounding_is_right_on_average_and_exact_for_what_fits() -> None:
    between = torch.full((40_000,), 1 + 2**-9)  # a quarter of the way to the next number
    round_stochastically(between, generator_of(0, 1, CPU))
    assert set(between.tolist()) == {1.0, 1 + 2**-7}
    assert float((between > 1).float().mean()) == pytest.approx(0.25, abs=0.02)
    fits = torch.randn(999).bfloat16().float()
    rounded = fits.clone()
    round_stochastically(rounded, generator_of(0, 1, CPU))
    assert torch.equal(rounded, fits)


def test_a_remainder_is_the_other_half_of_the_bits() -> None:
    values = torch.cat([torch.randn(9999), torch.tensor([1 + 2**-8, -1 - 2**-8, 0.0, 3e38, 1e-40])])
    rounded = values.clone()
    remainder = split_remainder(rounded)
    assert torch.equal(rounded.bfloat16().float(), rounded)
    join_remainder(rounded, remainder.to(torch.int16))
    assert torch.equal(rounded, values)


def test_each_step_rounds_other_weights_up() -> None:
    weight = nn.Linear(100, 100, bias=False).bfloat16()
    optimizer = built(weight, optimizer="sgd", sgd_momentum=0.0, lr=2**-10, weight_decay=0.0, **PURE)
    rounded = []
    for _ in range(2):
        nn.init.ones_(weight.weight)
        weight.weight.grad = torch.ones_like(weight.weight)
        optimizer.step()
        rounded.append(weight.weight.detach().float() < 1)
    assert all(0.2 < float(one.float().mean()) < 0.3 for one in rounded)
    assert float((rounded[0] & rounded[1]).float().mean()) == pytest.approx(1 / 16, abs=0.02)


def test_small_updates_are_kept_but_for_those_rounded_to_nearest() -> None:
    moved = {}
    for rounding in ("stochastic", "kahan", "nearest"):
        weight = nn.Linear(100, 100, bias=False).bfloat16()
        nn.init.ones_(weight.weight)
        optimizer = built(
            weight, optimizer="sgd", sgd_momentum=0.0, lr=1e-4, weight_decay=0.0, rounding=rounding, **PURE
        )
        for _ in range(30):
            weight.weight.grad = torch.ones_like(weight.weight)
            optimizer.step()
        moved[rounding] = float(1 - weight.weight.detach().float().mean())
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(30e-4, rel=0.1)
    assert moved["kahan"] == pytest.approx(30e-4, abs=2**-9)


@pytest.mark.parametrize("options", [{}, PURE, PURE | {"rounding": "kahan"}, PURE | {"optimizer": "muon"}])
def test_a_loaded_state_goes_on_bit_for_bit_and_no_generator_is_used(options: dict[str, Any]) -> None:
    whole = model()
    optimizer = built(whole, **options)
    stepped(whole, optimizer, 3)
    resumed = copy.deepcopy(whole)
    other = built(resumed, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.gate.step = optimizer.gate.step
    assert bits(other.state_dict()) == bits(optimizer.state_dict())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    stepped(whole, optimizer, first=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    stepped(resumed, other, first=3)
    assert bits([*resumed.parameters(), other.state_dict()]) == bits([*whole.parameters(), optimizer.state_dict()])


@pytest.mark.parametrize("options", [{}, PURE, PURE | {"rounding": "kahan"}, PURE | {"optimizer": "muon"}])
def test_a_closed_gate_on_a_device_leaves_every_bit(options: dict[str, Any]) -> None:
    module = model()
    config = OptimizerConfig(lr=0.01, params_dtype="bfloat16", **options)
    inner = build_optimizer([module], config).optimizer
    optimizer = TrainingOptimizer(inner, gate=DeviceFiniteGate(CPU))
    stepped(module, optimizer)
    before = bits([*module.parameters(), inner.state_dict()])
    fill(module, 9)
    next(module.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
    optimizer.step()
    fill(module, 10)
    optimizer.step()
    assert bits([*module.parameters(), inner.state_dict()]) == before


def test_losses_are_those_of_float32_but_for_weights_rounded_to_nearest() -> None:
    def final(**options: Any) -> float:
        torch.manual_seed(0)
        x = torch.randn(128, 16)
        y = torch.tanh(x @ torch.randn(16, 1))
        module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        optimizer = built(module.bfloat16() if options else module, lr=3e-4, **{"params_dtype": "float32", **options})
        loss = x.new_zeros(())
        for _ in range(200):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (module(x).float() - y).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    low: dict[str, Any] = {"params_dtype": "bfloat16"}
    exact, nearest = final(), final(**low, **PURE, rounding="nearest")
    assert final(**low) == pytest.approx(exact, abs=2e-2)
    assert final(**low, **PURE) == pytest.approx(exact, abs=3e-2)
    assert final(**low, **PURE, rounding="kahan") == pytest.approx(exact, abs=3e-2)
    assert nearest > exact + 5e-2


def test_types_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="requires a CPU or CUDA, got weights on meta"):
        built(model().to("meta"))


AWARE: dict[str, Any] = {"params_dtype": "float32", "use_precision_aware_optimizer": True}


@pytest.mark.parametrize("piece", [10, 2**21])
@pytest.mark.parametrize(
    ("types", "sizes"),
    [(("bfloat16", "bfloat16"), (2, 2)), (("bfloat16", "float32"), (2, 4)), (("float32", "bfloat16"), (4, 2))],
)
def test_moments_have_types_of_their_own_and_their_bytes_and_continue_to_the_bit(
    types: tuple[str, str], sizes: tuple[int, int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_precision, "PIECE_ELEMENTS", piece)
    options = {**AWARE, "exp_avg_dtype": types[0], "exp_avg_sq_dtype": types[1]}
    exact = model(torch.float32)
    stepped(exact, built(exact, params_dtype="float32"))
    module = model(torch.float32)
    optimizer = built(module, **options)
    stepped(module, optimizer, steps=3)
    for param in module.parameters():
        state = optimizer.state[param]
        assert tuple(state[name].nbytes // param.numel() for name in ("exp_avg", "exp_avg_sq")) == sizes
        assert set(state) == {"exp_avg", "exp_avg_sq", "step"}
    other = copy.deepcopy(module)
    resumed = built(other, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (resumed, optimizer):
        one.gate.begin_step(3)
    stepped(module, optimizer, steps=3, first=3)
    stepped(other, resumed, steps=3, first=3)
    assert bits(other.parameters()) == bits(module.parameters())
    for one, two in zip(module.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)
        assert not torch.equal(one, two)


def test_float32_moments_are_those_of_the_plain_optimizer() -> None:
    module = model(torch.float32)
    assert isinstance(built(module, **AWARE).optimizer, torch.optim.AdamW)


def test_master_weights_and_moments_in_bfloat16_go_together() -> None:
    module = model()
    optimizer = built(module, use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    stepped(module, optimizer)
    for param in module.parameters():
        held = {name: one.dtype for name, one in optimizer.state[param].items() if name != "step"}
        assert held == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16, "remainder": torch.int16}
