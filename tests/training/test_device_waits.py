"""Training as on an accelerator: its gate, its missing kernels, and how often the host waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onstep import CallbackManager
from onstep.optim import DeviceFiniteGate, as_step_optimizer
from tests.support.emulated_device import lack_bfloat16_check, use_device_gate
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


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, Megatronish])
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
