"""Training as on an accelerator: its gate, its missing kernels, and how often the host waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, Trainer, pretrain
from onstep.config import ConfigContainer
from onstep.models.layers import feed_forward
from onstep.optim import DeviceFiniteGate, LossScaler, MuonWithAdamW, as_step_optimizer
from tests.support.emulated_device import WaitCounter, lack_bfloat16_check, use_device_gate
from tests.support.small_models import Regression, arguments, regression_rows
from tests.support.small_runs import TinyModel, run, small_state, sum_step

CPU = torch.device("cpu")


class Megatronish:
    """Momentum behind Megatron-Core's convention."""

    def __init__(self, params: Any) -> None:
        self._inner = torch.optim.SGD(params, lr=0.1)
        self.param_groups = self._inner.param_groups

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def step(self) -> tuple[bool, float, int]:
        self._inner.step()
        return True, 0.5, 3


class AnotherPackages(torch.optim.SGD):
    """Has a step of its own, which may do anything."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.RMSprop, Megatronish])
@pytest.mark.parametrize("clip_grad", [0.0, 1.0], ids=["unclipped", "clipped"])
def test_a_model_in_bfloat16_is_trained_by_kernels_that_cuda_has(
    make_optimizer: Any, clip_grad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack_bfloat16_check(monkeypatch)
    use_device_gate(monkeypatch)
    model, state, losses = TinyModel(dtype=torch.bfloat16), small_state(train_iters=12), []
    state.cfg.optimizer.clip_grad = clip_grad
    optimizer = as_step_optimizer(make_optimizer(model.parameters()), [model], state.cfg.optimizer, device=CPU)
    before = [param.clone() for param in model.parameters()]

    def step(data_iterator: Any, model: Any) -> Any:
        output, loss_function = sum_step(data_iterator, model)
        losses.append(output.dtype)
        return output, loss_function

    run(state, CallbackManager(), step=step, model=model, optimizer=optimizer)

    assert isinstance(optimizer.gate, DeviceFiniteGate)
    assert set(losses) == {torch.bfloat16}
    assert state.train_state.step == 12
    assert not any(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def adamw(model: TinyModel) -> Any:
    return torch.optim.AdamW(model.parameters(), fused=True)


OPTIMIZERS: dict[str, tuple[Callable[[TinyModel], Any], int]] = {
    "configured AdamW": (adamw, 0),
    "configured SGD": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True), 0),
    "AdamW as scripts write it": (lambda model: torch.optim.AdamW(model.parameters()), 0),
    "SGD as scripts write it": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 0),
    "AdamW that is to be unfused": (lambda model: torch.optim.AdamW(model.parameters(), foreach=True), 0),
    "RMSprop": (lambda model: torch.optim.RMSprop(model.parameters()), 0),
    "Muon": (
        lambda model: MuonWithAdamW(
            torch.optim.Muon([model.out.weight]), torch.optim.AdamW([model.embed.weight, model.out.bias], fused=True)
        ),
        0,
    ),
    "another package's": (lambda model: AnotherPackages(model.parameters(), lr=0.1), 10),
    "Megatron": (lambda model: Megatronish(model.parameters()), 10),
}
"""How each is made, and how often the host waits in ten steps that are not logged."""

POLICIES: dict[str, tuple[dict[str, Any], int]] = {
    "skip": ({"train.on_nonfinite": "skip"}, 10),
    "threshold": ({"optimizer.grad_norm_skip_threshold": 1e9}, 10),
    "spikes": ({"anomaly.on_spike": "skip"}, 10),
    "float16": ({"float16": True}, 10),
    "skip, spikes and threshold": (
        {"train.on_nonfinite": "skip", "anomaly.on_spike": "skip", "optimizer.grad_norm_skip_threshold": 1e9},
        10,
    ),
    "float16, skip and threshold": (
        {"float16": True, "train.on_nonfinite": "skip", "optimizer.grad_norm_skip_threshold": 1e9},
        10,
    ),
    "float16 and spikes": ({"float16": True, "anomaly.on_spike": "skip"}, 20),
    "zeros": ({"optimizer.log_num_zeros_in_grad": True}, 0),
}


def waits_of_ten_steps(make_optimizer: Callable[[TinyModel], Any], settings: dict[str, Any] | None = None) -> int:
    """Waits in steps 2 to 11: the first update creates the optimizer's state."""
    model, state, counter, manager = TinyModel(), small_state(train_iters=12), WaitCounter(), CallbackManager()
    settings = dict(settings or {})
    scaler = LossScaler(2.0**8) if settings.pop("float16", False) else None
    for key, value in settings.items():
        section, _, name = key.partition(".")
        setattr(getattr(state.cfg, section), name, value)
    state.cfg.logger.log_interval = 1000
    manager.add(counter)
    with pytest.MonkeyPatch.context() as patch, counter.counting():
        use_device_gate(patch)
        torchs = make_optimizer(model)
        optimizer = as_step_optimizer(torchs, [model], state.cfg.optimizer, device=CPU, scaler=scaler)
        run(state, manager, model=model, optimizer=optimizer)
    assert isinstance(optimizer.gate, DeviceFiniteGate)
    assert state.train_state.step == 12
    assert state.train_state.num_skips == 0
    return counter.of_steps(2, 11)


@pytest.mark.parametrize(("make_optimizer", "expected"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_host_waits_only_for_optimizers_that_need_it(make_optimizer: Any, expected: int) -> None:
    assert waits_of_ten_steps(make_optimizer) == expected


@pytest.mark.parametrize(("settings", "expected"), POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize(
    "make_optimizer", [adamw, lambda model: Megatronish(model.parameters())], ids=["torch", "mega"]
)
def test_what_the_policies_need_of_a_step_is_read_at_once(
    make_optimizer: Any, settings: dict[str, Any], expected: int
) -> None:
    is_torchs = make_optimizer is adamw
    assert waits_of_ten_steps(make_optimizer, settings) == (expected if is_torchs else max(expected, 10))


def test_a_script_with_an_optimizer_of_its_own_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device_gate(monkeypatch)
    model, counter = Regression(), WaitCounter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(
        model,
        arguments(tmp_path, per_device_train_batch_size=2, max_steps=12, logging_steps=1000, save_strategy="no"),
        train_dataset=regression_rows(24),
        optimizers=(optimizer, None),
        callbacks=[counter],
    )
    with counter.counting():
        trainer.train()
    assert trainer.state.global_step == 12
    assert counter.of_steps(2, 11) == 0


def test_a_configured_run_does_not_wait(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device_gate(monkeypatch)
    counter, config = WaitCounter(), tiny_config
    config.train.train_iters, config.logger.log_interval = 12, 1000
    config.validation.eval_interval, config.optimizer.optimizer = None, "muon"
    config.run.name, config.run.output_dir = "run", str(tmp_path)
    with counter.counting():
        state = pretrain(config, callbacks=[counter])
    assert state.train_state.step == 12
    assert counter.of_steps(2, 11) == 0


def test_experts_in_float32_are_not_waited_for(
    tiny_config: ConfigContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_device_gate(monkeypatch)
    as_on_cpu = feed_forward.way_to_multiply
    monkeypatch.setattr(feed_forward, "way_to_multiply", lambda _, *args: as_on_cpu(torch.device("cuda"), *args))
    counter, config = WaitCounter(), tiny_config
    config.train.train_iters, config.logger.log_interval = 12, 1000
    config.validation.eval_interval, config.model.num_moe_experts = None, 4
    config.run.name, config.run.output_dir = "run", str(tmp_path)
    with counter.counting():
        pretrain(config, callbacks=[counter])
    assert counter.of_steps(2, 11) == 0


def test_a_wait_is_noticed() -> None:
    counter, norm = WaitCounter(), torch.ones(())
    with counter.counting():
        assert norm
        assert float(norm) == norm.item() == norm.tolist()
    assert counter.waits[0] == 4
