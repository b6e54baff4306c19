"""On a GPU: counting zeros waits for nothing, Muon's step is the CPU's, and a large step or a NaN changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onstep.config import OptimizerConfig
from onstep.optim import TrainingOptimizer, build_optimizer
from tests.support.exact_steps import bits, fill_grads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_model(device: str = "cuda") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(device)


def test_zeros_are_counted_on_the_device_without_waiting() -> None:
    model = make_model()
    optimizer = TrainingOptimizer(torch.optim.AdamW(model.parameters(), fused=True), log_num_zeros_in_grad=True)
    fill_grads(model, 0)
    optimizer.step()
    fill_grads(model, 1)
    model[0].weight.grad[:4] = 0  # type: ignore[index, union-attr]
    torch.cuda.set_sync_debug_mode("error")
    try:
        zeros = optimizer.step()[2]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert zeros is not None
    assert (zeros.device.type, zeros.dtype, int(zeros)) == ("cuda", torch.int64, 24)


def test_a_step_above_the_threshold_or_not_finite_changes_nothing() -> None:
    for name in ("adam", "sgd", "muon"):
        model = make_model()
        optimizer = build_optimizer([model], OptimizerConfig(optimizer=name, lr=0.01, grad_norm_skip_threshold=100.0))
        fill_grads(model, 0)
        assert optimizer.step()[0] is True
        before = bits(model.parameters()), bits(optimizer.state_dict())
        for value in (1e4, float("nan")):
            fill_grads(model, 1)
            model[1].weight.grad[0, 0] = value  # type: ignore[index, union-attr]
            optimizer.step()
            assert (bits(model.parameters()), bits(optimizer.state_dict())) == before, (name, value)


def test_muon_steps_as_on_the_cpu() -> None:
    models = [make_model("cpu"), make_model()]
    for model in models:
        optimizer = build_optimizer([model], OptimizerConfig(optimizer="muon", lr=0.01))
        for seed in range(3):
            fill_grads(model, seed)
            assert optimizer.step()[0] is True
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0.03, atol=2e-3)
