"""Steps under the gate of an accelerator, emulated on a CPU: nothing is applied while it is closed, nor waited for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onstep.optim.guarded_step
from onstep.optim import DeviceFiniteGate, MuonWithAdamW, TrainingOptimizer
from onstep.optim.sharded_muon import Float32Muon
from tests.support.emulated_device import WaitCounter
from tests.support.exact_steps import bits, fill_grads
from tests.support.exact_steps import stack as make_model

CPU = torch.device("cpu")
OF_TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam-amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True, foreach=False),
    "adamax": torch.optim.Adamax,
    "adamw-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw-tensor-lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), foreach=False),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop-momentum": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "sgd-foreach": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=True),
    "sgd-plain": lambda params: torch.optim.SGD(params, lr=1e-2, foreach=False),
}
MADE_FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def muon(params: Any, kind: type[torch.optim.Muon] = torch.optim.Muon) -> torch.optim.Optimizer:
    params = list(params)
    others = torch.optim.AdamW([one for one in params if one.ndim != 2], fused=True)
    return MuonWithAdamW(kind([one for one in params if one.ndim == 2]), others)


EVERY = OF_TORCH | MADE_FUSED | {"muon": muon, "muon-float32": lambda params: muon(params, Float32Muon)}


def every(optimizers: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("make_optimizer", optimizers.values(), ids=optimizers.keys())


def gated(model: nn.Module, make_optimizer: Any) -> TrainingOptimizer:
    return TrainingOptimizer(make_optimizer(model.parameters()), gate=DeviceFiniteGate(CPU))


def one_step(model: nn.Module, optimizer: TrainingOptimizer, step: int, spoiled: bool = False, **options: Any) -> bool:
    optimizer.gate.begin_step(step)
    fill_grads(model, step, **options)
    if spoiled:
        next(param.grad for param in model.parameters() if param.grad is not None).view(-1)[0] = float("nan")
    optimizer.prepare()
    return optimizer.apply()


def everything(model: nn.Module, optimizer: TrainingOptimizer) -> Any:
    return bits([model.parameters(), optimizer.state_dict()])


@pytest.fixture(params=[2**28, 1], ids=["whole", "in parts"])
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onstep.optim.guarded_step, "PART_BYTES", request.param)


@pytest.mark.usefixtures("_parts")
@every(EVERY)
def test_nothing_is_applied_or_waited_for_while_the_gate_is_closed(make_optimizer: Any) -> None:
    model = make_model()
    optimizer = gated(model, make_optimizer)
    one_step(model, optimizer, 0)
    with WaitCounter().counting() as counter:
        assert all(one_step(model, optimizer, step) for step in (1, 2))
    assert counter.waits.total() == 0
    before = everything(model, optimizer)
    with WaitCounter().counting() as counter:
        assert all(one_step(model, optimizer, step, spoiled=step == 3) for step in (3, 4, 5))
    assert counter.waits.total() == 0
    assert everything(model, optimizer) == before
    assert optimizer.gate.poll(force=True) == 3
    assert one_step(model, optimizer, 6) is False


@every(EVERY)
def test_the_host_learns_in_time_and_counts_as_if_nothing_had_happened(make_optimizer: Any) -> None:
    model = make_model()
    optimizer = gated(model, make_optimizer)
    for step in range(4):
        one_step(model, optimizer, step)
    before = everything(model, optimizer)
    for step in range(4, 40):
        if not one_step(model, optimizer, step, spoiled=step == 4):
            break
        optimizer.gate.poll()
    assert step <= 15
    assert bits([model.parameters(), optimizer.optimizer.state_dict()]) == before


@every(EVERY)
def test_a_run_goes_on_after_a_reset_that_nobody_preceded_with_a_poll(make_optimizer: Any) -> None:
    clean, spoiled = make_model(), make_model()
    optimizers = gated(clean, make_optimizer), gated(spoiled, make_optimizer)
    for step in range(3):
        one_step(clean, optimizers[0], step)
        one_step(spoiled, optimizers[1], step)
    for step in (3, 4):
        one_step(spoiled, optimizers[1], step, spoiled=True)
    optimizers[1].gate.reset()
    for step in (5, 6):
        one_step(clean, optimizers[0], step)
        one_step(spoiled, optimizers[1], step)
    assert everything(spoiled, optimizers[1]) == everything(clean, optimizers[0])


@pytest.mark.usefixtures("_parts")
@every(OF_TORCH)
def test_clean_steps_of_a_guarded_optimizer_have_torchs_bits(make_optimizer: Any) -> None:
    ours, theirs = make_model(), make_model()
    optimizer, plain = gated(ours, make_optimizer), make_optimizer(theirs.parameters())
    for step in range(4):
        one_step(ours, optimizer, step, without=(step,))
        fill_grads(theirs, step, without=(step,))
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        plain.step()
        assert [one.grad is None for one in ours.parameters()] == [one.grad is None for one in theirs.parameters()]
    assert bits([ours.parameters(), optimizer.state_dict()]) == bits([theirs.parameters(), plain.state_dict()])


@every(MADE_FUSED)
def test_kernels_left_to_torch_are_fused_ones_on_an_accelerator_only(make_optimizer: Any) -> None:
    ours, theirs, on_host = make_model(), make_model(), make_model()
    optimizer, plain = gated(ours, make_optimizer), make_optimizer(theirs.parameters())
    for group in plain.param_groups:
        group["fused"] = True
    assert {group["fused"] for group in optimizer.param_groups} == {True}
    for step in range(3):
        one_step(ours, optimizer, step)
        fill_grads(theirs, step)
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        plain.step()
    assert bits(ours.parameters()) == bits(theirs.parameters())
    untouched = TrainingOptimizer(make_optimizer(on_host.parameters()))
    assert {group["fused"] for group in untouched.param_groups}.isdisjoint([True])


@every(MADE_FUSED)
def test_a_state_of_unfused_kernels_is_continued_by_fused_ones(make_optimizer: Any) -> None:
    model = make_model()
    before = TrainingOptimizer(make_optimizer(model.parameters()))
    for step in range(2):
        one_step(model, before, step)
    saved = copy.deepcopy(before.state_dict())
    optimizer = gated(model, make_optimizer)
    optimizer.load_state_dict(saved)
    with WaitCounter().counting() as counter:
        one_step(model, optimizer, 2)
        assert counter.waits.pop(0) == 1, "the first step reads the flag"
        one_step(model, optimizer, 3)
    assert counter.waits.total() == 0
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert all(float(step) == 4 for step in steps)


@pytest.mark.parametrize("settings", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"capturable": True}])
def test_a_choice_of_kernels_is_kept(settings: dict[str, bool]) -> None:
    model = make_model()
    optimizer = gated(model, lambda params: torch.optim.AdamW(params, **settings))
    assert all(group[name] is value for group in optimizer.param_groups for name, value in settings.items())
    assert not any(group["fused"] for group in optimizer.param_groups)


@every(EVERY)
def test_a_parameter_whose_first_gradient_is_bad_has_no_state_of_it(make_optimizer: Any) -> None:
    clean, spoiled = make_model(), make_model()
    optimizers = gated(clean, make_optimizer), gated(spoiled, make_optimizer)
    for step in (0, 1):
        for model, optimizer in zip((clean, spoiled), optimizers, strict=True):
            one_step(model, optimizer, step, without=(0, 5))
    one_step(spoiled, optimizers[1], 2, spoiled=True)
    optimizers[1].gate.poll(force=True)
    optimizers[1].gate.reset()
    for model, optimizer in zip((clean, spoiled), optimizers, strict=True):
        one_step(model, optimizer, 3)
    assert bits(spoiled.parameters()) == bits(clean.parameters())


def test_an_optimizer_with_a_hook_is_run_once_and_only_while_the_gate_is_open() -> None:
    model, calls = make_model(), []
    optimizer = gated(model, torch.optim.RMSprop)
    optimizer.optimizer.register_step_post_hook(lambda *args: calls.append(1))
    one_step(model, optimizer, 0)
    with WaitCounter().counting() as counter:
        assert one_step(model, optimizer, 1) is True
        before = everything(model, optimizer)
        one_step(model, optimizer, 2, spoiled=True)
    assert everything(model, optimizer) == before
    assert len(calls) == 2
    assert counter.waits.total() >= 2


@pytest.mark.parametrize("has_hook", [True, False], ids=["hook", "plain"])
def test_a_rank_with_a_hook_or_whose_state_is_asked_for_learns_when_the_others_do(has_hook: bool) -> None:
    model = make_model()
    optimizer = gated(model, torch.optim.RMSprop)
    if has_hook:
        optimizer.optimizer.register_step_post_hook(lambda *args: None)
    for step in range(20):
        assert one_step(model, optimizer, step, spoiled=step == 3) is True
        optimizer.state_dict()
        if optimizer.gate.poll() is not None:
            break
    assert step == 10


@every(EVERY)
def test_a_closed_gate_does_not_hold_back_steps_that_a_user_takes(make_optimizer: Any) -> None:
    ours, theirs = make_model(), make_model()
    optimizer, plain = gated(ours, make_optimizer), gated(theirs, make_optimizer)
    for step in range(3):
        one_step(ours, optimizer, step, spoiled=step == 2)
        if step < 2:
            one_step(theirs, plain, step)
    assert optimizer.gate.poll(force=True) == 2
    for model, one in ((ours, optimizer), (theirs, plain)):
        fill_grads(model, 3)
        one.optimizer.step()
    assert bits(ours.parameters()) == bits(theirs.parameters())


def test_a_guard_does_not_copy_what_is_known_to_be_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    optimizer = gated(model, torch.optim.RMSprop)
    one_step(model, optimizer, 0)
    monkeypatch.setattr(onstep.optim.guarded_step.GuardedStep, "__call__", lambda *args: pytest.fail("guarded"))
    fill_grads(model, 1)
    optimizer.prepare()
    optimizer.read()
    assert optimizer.apply() is True
