"""Own stepping: bitwise what `torch.optim` does, whatever changes between steps, and by its `step` where it must."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from onstep.optim import MuonWithAdamW, TrainingOptimizer
from onstep.optim.fused_step import FusedStep
from tests.support.exact_steps import bits, fill_grads, stack

Make = Callable[[Any], torch.optim.Optimizer]

FUSED: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.3, fused=True),
    "adamw-maximize": lambda groups: torch.optim.AdamW(groups, lr=1e-2, maximize=True, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.3, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, fused=True),
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.1, fused=True),
    "sgd-nesterov": lambda groups: torch.optim.SGD(
        groups, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
    ),
}
OTHERS: dict[str, Make] = {
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "adamw-for-loop": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw-amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, fused=True),
    "adamw-tensor-lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
}


def make_model() -> nn.Sequential:
    return stack().append(nn.Linear(3, 3).double())


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], "lr": 3e-2}, {"params": params[3:], "weight_decay": 0.0}]


def assert_same(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    left, right = ([bits(m.parameters()), bits(o.state_dict())] for m, o in zip(models, optimizers, strict=True))
    assert left == right


class Pair:
    """The same model twice: stepped by torch, and by our own steps. Counts the calls that reach `optimizer.step`."""

    def __init__(self, make: Make) -> None:
        self.models = [make_model(), make_model()]
        self.torchs, self.ours = (make(two_groups(model)) for model in self.models)
        self.own_step = FusedStep(self.ours)

    def step(self, seed: int, without: tuple[int, ...] = ()) -> None:
        for model in self.models:
            fill_grads(model, seed, without=without)
        self.torchs.step()
        self.own_step()
        self.check()

    def check(self) -> None:
        assert_same(self.models, [self.torchs, self.ours])

    def both(self, change: Callable[[torch.optim.Optimizer], None]) -> None:
        change(self.torchs)
        change(self.ours)


@pytest.fixture
def profiled_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the optimizers whose `step` of torch ran, by its profiler's wrapper."""
    names: list[str] = []

    class Recorded(torch.autograd.profiler.record_function):
        def __init__(self, name: str, args: str | None = None) -> None:
            names.append(name)
            super().__init__(name, args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Recorded)
    return names


def three_steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    step = FusedStep(optimizer)
    for seed in range(3):
        fill_grads(model, seed)
        step()


@pytest.mark.parametrize("name", [*FUSED, *OTHERS])
def test_twenty_steps_of_two_groups_are_bitwise_torchs(name: str) -> None:
    pair = Pair({**FUSED, **OTHERS}[name])
    for seed in range(20):
        pair.step(seed)


@pytest.mark.parametrize(("name", "counts"), [*((name, (0, 1)) for name in FUSED), *((name, (3,)) for name in OTHERS)])
def test_after_the_first_step_torchs_is_called_for_what_is_not_known_only(
    name: str, counts: tuple[int, ...], profiled_steps: list[str]
) -> None:
    model = make_model()
    three_steps({**FUSED, **OTHERS}[name](two_groups(model)), model)
    assert len(profiled_steps) in counts


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("adamw", {"foreach": True}),
        ("adamw", {"amsgrad": True}),
        ("adamw", {"capturable": True}),
        ("adamw", {"differentiable": True}),
        ("adamw", {"lr": torch.tensor(1e-2)}),
        ("sgd-momentum", {"foreach": True}),
        ("sgd-momentum", {"differentiable": True}),
        ("sgd-momentum", {"lr": torch.tensor(1e-2)}),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one)),
)
def test_a_setting_that_is_not_ours_leaves_the_step_to_torch(
    name: str, setting: dict[str, Any], profiled_steps: list[str]
) -> None:
    model = make_model()
    optimizer = FUSED[name](two_groups(model))
    step = FusedStep(optimizer)
    fill_grads(model, 0)
    step()
    step()
    before = len(profiled_steps)
    optimizer.param_groups[1].update(setting)
    with suppress(RuntimeError, KeyError):  # torch refuses some of them beside `fused`
        step()
    assert len(profiled_steps) == before + 1


class KernelTypes(TorchDispatchMode):
    """Notes the types of the parameters that each call of a fused kernel gets."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("aten::_fused_"):
            self.types.append({param.dtype for param in args[0]})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FUSED)
def test_a_kernel_gets_parameters_of_one_type(name: str) -> None:
    model = make_model()
    step = FusedStep(FUSED[name](two_groups(model)))
    fill_grads(model, 0)
    step()
    with KernelTypes() as seen:
        step()
    assert sorted(map(str, seen.types)) == ["{torch.float32}"] * 2 + ["{torch.float64}"]


@pytest.mark.parametrize("has_autograd", [True, False])
def test_a_step_leaves_autograd_as_it_was(has_autograd: bool) -> None:
    model = make_model()
    step = FusedStep(FUSED["adamw"](model.parameters()))
    fill_grads(model, 0)
    step()
    with torch.set_grad_enabled(has_autograd):
        step()
        assert torch.is_grad_enabled() is has_autograd


@pytest.mark.parametrize("name", FUSED)
def test_parameters_may_have_no_gradient_at_some_steps(name: str) -> None:
    pair = Pair(FUSED[name])
    late = () if "sgd-" in name else (5,)  # torch's fused SGD cannot start a momentum later than the others
    for seed, without in enumerate([late, late, (), (), (1,), (2,), (2,), (), (0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2)]):
        pair.step(seed, without)


@pytest.mark.parametrize("name", FUSED)
def test_a_state_goes_both_ways_between_ours_and_torchs(name: str) -> None:
    pair = Pair(FUSED[name])
    for seed in range(3):
        pair.step(seed)
    states = [copy.deepcopy(one.state_dict()) for one in (pair.torchs, pair.ours)]
    for seed in range(3, 6):
        pair.step(seed)
    pair.torchs.load_state_dict(states[1])
    pair.ours.load_state_dict(states[0])
    for seed in range(6, 10):
        pair.step(seed)


@pytest.mark.parametrize("name", FUSED)
def test_settings_may_change_between_steps(name: str) -> None:
    pair = Pair(FUSED[name])
    pair.step(0)

    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["weight_decay"] = 0.5, 0.7
        for key, value in (("betas", (0.5, 0.6)), ("eps", 1e-3), ("momentum", 0.4), ("dampening", 0.0)):
            if key in optimizer.param_groups[0]:
                optimizer.param_groups[0][key] = value

    pair.step(1)
    pair.both(change)
    pair.step(2)
    pair.both(lambda one: one.param_groups[0].update(lr=torch.tensor(0.25)))
    pair.step(3)
    pair.both(lambda one: one.param_groups[0].update(lr=0.125, fused=False, foreach=True))
    pair.step(4)


@pytest.mark.parametrize("name", FUSED)
def test_groups_and_parameters_may_come_and_go(name: str) -> None:
    pair = Pair(FUSED[name])
    pair.step(0)
    pair.step(1)
    for model, optimizer in zip(pair.models, (pair.torchs, pair.ours), strict=True):
        model.append(make_model()[2])
        optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.2})
    pair.step(2)
    pair.step(3)
    for model, optimizer in zip(pair.models, (pair.torchs, pair.ours), strict=True):
        for param in model[-1].parameters():
            optimizer.state.pop(param, None)
        model[-1] = make_model()[2]
        optimizer.param_groups[2]["params"][:] = model[-1].parameters()  # the same list, and of the same length
    pair.step(4)
    pair.step(5)


@pytest.mark.parametrize("name", [one for one in FUSED if "sgd-" not in one])  # torch's cannot start a momentum later
def test_parameters_may_be_added_to_the_list_of_a_group(name: str) -> None:
    pair = Pair(FUSED[name])
    pair.step(0)
    pair.step(1)
    for model, optimizer in zip(pair.models, (pair.torchs, pair.ours), strict=True):
        model.append(make_model()[2])
        optimizer.param_groups[1]["params"] += model[-1].parameters()
    pair.step(2)
    pair.step(3)


@pytest.mark.parametrize("name", FUSED)
def test_a_parameter_may_change_its_group_and_a_group_be_replaced(name: str) -> None:
    pair = Pair(FUSED[name])
    pair.step(0)
    pair.step(1)
    pair.both(lambda one: one.param_groups[1]["params"].insert(0, one.param_groups[0]["params"].pop()))
    pair.step(2)
    pair.both(lambda one: one.param_groups.__setitem__(0, {**one.param_groups[0], "lr": 0.7}))
    pair.step(3)


def test_state_may_be_cleared_and_replaced_in_place() -> None:
    pair = Pair(FUSED["adamw"])
    pair.step(0)
    pair.step(1)
    changes: list[Callable[[torch.optim.Optimizer], None]] = [
        lambda one: one.state[one.param_groups[0]["params"][0]].clear(),
        lambda one: one.state[one.param_groups[0]["params"][1]].update(exp_avg=torch.ones(7)),
        lambda one: one.state.update({one.param_groups[0]["params"][2]: {}}),
        lambda one: one.state.clear(),
    ]
    for seed, change in enumerate(changes):
        pair.both(change)
        pair.step(seed + 2)
        pair.step(seed + 10)


def test_hooks_are_called(profiled_steps: list[str]) -> None:
    for register in (
        lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
        lambda optimizer, hook: optimizer.register_step_post_hook(hook),
        lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
        lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    ):
        model = make_model()
        calls: list[int] = []
        optimizer = FUSED["adamw"](model.parameters())
        step = FusedStep(optimizer)
        for seed in range(2):
            fill_grads(model, seed)
            step()
        handle = register(optimizer, lambda *_, calls=calls: calls.append(1))
        step()
        assert calls == [1]
        handle.remove()
        step()
        assert calls == [1]


@pytest.mark.parametrize("where", ["object", "class"])
def test_a_step_that_was_replaced_is_called(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_model(), []
    optimizer = FUSED["adamw"](model.parameters())
    step = FusedStep(optimizer)
    fill_grads(model, 0)
    step()
    step()
    plain = torch.optim.AdamW.step

    def counted(*args: Any) -> None:
        calls.append(1)
        plain(optimizer)  # type: ignore[arg-type]

    counted.__wrapped__ = plain  # type: ignore[attr-defined]  # as of functools.wraps
    monkeypatch.setattr(optimizer if where == "object" else torch.optim.AdamW, "step", counted)
    step()
    assert calls == [1]


def test_a_subclass_steps_by_itself() -> None:
    class Halving(torch.optim.AdamW):
        calls = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.calls += 1
            super().step(closure)

    optimizer = Halving((model := make_model()).parameters(), fused=True)
    three_steps(optimizer, model)
    assert optimizer.calls == 3


class Named(torch.optim.AdamW):
    pass


class Tagged(nn.Parameter):
    pass


def test_a_subclass_of_optimizer_or_parameter_steps_by_torch(profiled_steps: list[str]) -> None:
    plain, tagged = make_model(), nn.Module()
    tagged.weight = Tagged(torch.ones(3))
    three_steps(Named(plain.parameters(), fused=True), plain)
    three_steps(FUSED["adamw"](tagged.parameters()), tagged)
    assert len(profiled_steps) == 6


@pytest.mark.parametrize("name", FUSED)
def test_attributes_of_a_gradient_scaler_are_heeded(name: str) -> None:
    pair = Pair(FUSED[name])
    pair.step(0)
    pair.step(1)
    pair.both(lambda one: vars(one).update(found_inf=torch.tensor(0.0)))
    pair.step(2)
    pair.both(lambda one: vars(one).update(found_inf=torch.tensor(1.0)))
    pair.step(3)
    pair.both(lambda one: vars(one).pop("found_inf"))
    pair.both(lambda one: vars(one).update(grad_scale=torch.tensor(4.0)))
    pair.step(4)
    pair.both(lambda one: vars(one).pop("grad_scale"))
    pair.step(5)


def test_a_torch_scheduler_sees_the_steps_and_sets_the_rate(profiled_steps: list[str]) -> None:
    pair = Pair(FUSED["adamw"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (pair.torchs, pair.ours)]
        for seed in range(4):
            vars(pair.ours).pop("_opt_called", None)  # which a step sets
            pair.step(seed)
            assert vars(pair.ours)["_opt_called"] is True
            for scheduler in schedulers:
                scheduler.step()
    assert pair.ours.param_groups[0]["lr"] == 3e-2 / 16
    assert len(profiled_steps) == 4 + 1


def test_a_scheduler_that_comes_before_the_first_step_still_warns() -> None:
    optimizer = FUSED["sgd"](make_model().parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step\(\)"):
        scheduler.step()


def test_a_profile_still_names_the_step() -> None:
    model = make_model()
    step = FusedStep(FUSED["adamw"](model.parameters()))
    fill_grads(model, 0)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    assert "Optimizer.step#AdamW.step" in {event.key for event in profiled.key_averages()}


def test_a_momentum_of_nothing_from_an_old_state_is_started_by_torch() -> None:
    pair = Pair(FUSED["sgd-momentum"])
    pair.step(0)
    for optimizer in (pair.torchs, pair.ours):
        for state in optimizer.state.values():
            state["momentum_buffer"] = None
    pair.step(1)
    pair.step(2)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_with_adamw_is_bitwise_torchs_two(nesterov: bool, profiled_steps: list[str]) -> None:
    models = [make_model(), make_model()]
    optimizers = []
    for model in models:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        muon = torch.optim.Muon(matrices[:1], lr=1e-2, nesterov=nesterov)
        muon.add_param_group({"params": matrices[1:], "lr": 2e-2})
        optimizers.append((muon, torch.optim.AdamW(others, lr=1e-2, fused=True)))
    joined = TrainingOptimizer(MuonWithAdamW(*optimizers[1]), clip_grad=None)
    for seed in range(20):
        for model in models:
            fill_grads(model, seed, without=(0,) if seed in (7, 8) else ())
        for one in optimizers[0]:
            one.step()  # type: ignore[no-untyped-call]
        joined.prepare()
        assert joined.apply() is True
        assert bits(models[0].parameters()) == bits(models[1].parameters())
    for plain, mine in zip(*optimizers, strict=True):
        theirs = [plain.state[p] for group in plain.param_groups for p in group["params"]]
        assert bits(theirs) == bits([mine.state[p] for group in mine.param_groups for p in group["params"]])
    ours = len(profiled_steps) - 2 * 20
    assert ours == 20 + 2 + 1, "the joined step, each part to make its state, and Muon when a gradient went missing"


@pytest.mark.parametrize("clip_grad", [None, 1.0])
@pytest.mark.parametrize("name", FUSED)
def test_a_training_optimizer_is_torchs_clipping_and_step(name: str, clip_grad: float | None) -> None:
    models = [make_model().float(), make_model().float()]
    plain, wrapped = (FUSED[name](two_groups(model)) for model in models)
    optimizer = TrainingOptimizer(wrapped, clip_grad=clip_grad)
    for seed in range(20):
        for model in models:
            fill_grads(model, seed, without=(2,) if seed == 9 else ())
        factor = 0.5 if seed % 3 == 0 else None  # a power of two: no other rounding
        for param in models[0].parameters():
            if factor is not None and param.grad is not None:
                param.grad.mul_(factor)
        nn.utils.clip_grad_norm_(models[0].parameters(), clip_grad or float("inf"))
        plain.step()
        optimizer.prepare(factor, needs_norm=bool(seed % 2))
        assert optimizer.apply() is True
        assert_same(models, [plain, wrapped])


@pytest.mark.parametrize("name", ["sgd-momentum", "sgd-nesterov", "adamw"])
def test_a_parameter_that_gets_a_gradient_later_is_updated_as_by_unfused_kernels(name: str) -> None:
    ours, theirs = stack(), stack()
    fused, unfused = FUSED[name](ours.parameters()), FUSED[name](theirs.parameters())
    for group in unfused.param_groups:
        group["fused"] = False
    step = FusedStep(fused)
    for number in range(4):
        without = (1, 3) if number < 2 else ()
        fill_grads(ours, number, without=without)
        fill_grads(theirs, number, without=without)
        step()
        unfused.step()
        assert all(param.grad is not None for place, param in enumerate(ours.parameters()) if place not in without)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
