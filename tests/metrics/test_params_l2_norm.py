"""The norm of all parameters of one process, against float64. With ranks: tests/distributed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from onstep.errors import ConfigError
from onstep.metrics import calc_dtensor_params_l2_norm, calc_params_l2_norm
from onstep.metrics.norms.params_l2_norm import unread_params_l2_norm

BF16 = SimpleNamespace(bf16=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.out = nn.Embedding(11, 5), nn.Linear(5, 5), nn.Linear(5, 11, bias=False)
        self.out.weight = self.embed.weight


def exact(*tensors: Tensor) -> float:
    return math.hypot(*torch.cat([one.detach().double().flatten() for one in tensors]).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_that_of_float64_with_a_tied_parameter_once(dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    assert len(list(model.parameters())) == 3
    assert calc_params_l2_norm(model, None) == pytest.approx(exact(*model.parameters()), rel=1e-12)


def test_chunks_count_together_and_one_that_they_share_once() -> None:
    one, other = Tied(), nn.Linear(3, 2)
    assert calc_params_l2_norm([one, other, one], None) == pytest.approx(
        exact(*one.parameters(), *other.parameters()), rel=1e-12
    )


def test_half_precision_neither_overflows_nor_loses_digits() -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((1000,), 60_000.0, dtype=torch.float16))])
    value = float(torch.tensor(60_000.0, dtype=torch.float16))
    assert calc_params_l2_norm(model, None) == pytest.approx(value * math.sqrt(1000), rel=1e-12)


def test_main_parameters_are_measured_with_bf16_only_and_unless_it_is_forced() -> None:
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    model.weight.main_param = torch.full((4, 4), 3.0)
    assert calc_params_l2_norm(model, BF16) == 12.0
    own = exact(model.weight)
    assert calc_params_l2_norm(model, SimpleNamespace(bf16=False)) == pytest.approx(own, rel=1e-12)
    assert calc_params_l2_norm(model, BF16, force_create_fp32_copy=True) == pytest.approx(own, rel=1e-12)
    model.weight.main_param = None
    assert calc_params_l2_norm(model, BF16) == pytest.approx(own, rel=1e-12), "none yet"
    model.weight.main_param_sharded = True
    assert calc_params_l2_norm(model, BF16) == 0.0, "other ranks have all of it"


def test_shared_parameters_do_not_count_here_and_quantised_ones_have_no_norm() -> None:
    model = nn.ParameterDict({"mine": torch.full((4,), 2.0), "theirs": torch.ones(3)})
    model["theirs"].shared = True
    model.packed = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    assert calc_params_l2_norm(model, None) == 4.0


def test_a_model_without_parameters_has_the_norm_zero() -> None:
    assert calc_params_l2_norm(nn.ReLU(), None) == 0.0


def test_not_a_number_is_shown() -> None:
    assert math.isnan(calc_params_l2_norm(nn.ParameterList([nn.Parameter(torch.tensor([1.0, math.nan]))]), None))


def test_the_unread_norm_is_the_same_number() -> None:
    model = Tied()
    norm = unread_params_l2_norm(model)
    assert (norm.shape, norm.dtype) == ((), torch.float64)
    assert float(norm) == calc_params_l2_norm(model, None)


def test_plain_tensors_are_no_dtensors() -> None:
    with pytest.raises(ConfigError, match="parameter 0 must be a DTensor, got Parameter"):
        calc_dtensor_params_l2_norm(nn.Linear(2, 2).parameters())
    assert calc_dtensor_params_l2_norm([]) == 0.0


def test_communication_of_a_chunk_is_stopped_before_its_parameters_are_looked_at() -> None:
    class Chunk(nn.Linear):
        stopped = False

        def stop_communication(self) -> None:
            self.stopped = True

    chunk = Chunk(2, 2)
    with pytest.raises(ConfigError, match="weight must be a DTensor"):
        calc_params_l2_norm([chunk], None, use_megatron_fsdp=True)
    assert chunk.stopped
