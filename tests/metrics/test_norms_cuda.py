"""On a GPU: the same norms, nothing waits for the device before they are read, and then once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from onstep.metrics.norms.parameter_norms import full_norms, local_parameter_norms, parameter_norms
from onstep.metrics.norms.params_l2_norm import calc_params_l2_norm, unread_params_l2_norm
from onstep.metrics.norms.spectral_norms import SpectralNorms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norms_are_those_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.LayerNorm(400), nn.Linear(400, 20)).to("cuda", dtype)
    norms, spectral = parameter_norms(model), SpectralNorms().measure(model)
    for name, parameter in model.named_parameters():
        exact = parameter.detach().double().cpu()
        assert norms[name] == pytest.approx(float(exact.norm()), rel=1e-12)
        largest = torch.linalg.matrix_norm(exact, 2) if exact.dim() == 2 else exact.abs().max()
        assert spectral[name] == pytest.approx(float(largest), rel=0.01)


def test_huge_values_do_not_overflow() -> None:
    model = nn.ParameterDict({"w": torch.full((100,), 3e38, device="cuda")})
    assert parameter_norms(model)["w"] == pytest.approx(3e39, rel=1e-6)


def test_the_norm_of_a_model_is_made_without_waiting_and_read_once() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]).to("cuda", torch.bfloat16)
    exact = torch.cat([one.detach().double().flatten() for one in model.parameters()]).norm()
    unread_params_l2_norm(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = unread_params_l2_norm(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.device.type == "cuda"
    assert float(norm) == pytest.approx(float(exact), rel=1e-12)
    assert calc_params_l2_norm(model, None) == float(norm)


def test_only_reading_waits_for_the_device() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]).to("cuda")
    local_parameter_norms(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        local = local_parameter_norms(model)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            full_norms(local, model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(caught) == 1
