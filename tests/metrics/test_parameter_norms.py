"""Norms of parameters and gradients against a computation in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import onstep.metrics.norms.parameter_norms as parameter_norms_module
from onstep.metrics.norms.named_parameters import MissingOnce, missing_parameters, named_parameters
from onstep.metrics.norms.parameter_norms import (
    gradient_norms,
    local_norms,
    local_parameter_norms,
    parameter_norms,
    report_l2_norm_grad,
    total_norm,
)
from tests.support.exact_steps import HOST_READS, OpCounter


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.out = nn.Embedding(11, 5), nn.Linear(5, 5), nn.Linear(5, 11, bias=False)
        self.out.weight = self.embed.weight


def exact(tensor: Tensor) -> float:
    return math.hypot(*tensor.detach().double().flatten().tolist())


def model_of(*tensors: Tensor) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])


def test_norms_are_those_of_float64_in_the_order_of_the_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40), nn.Conv2d(3, 4, 3))
    norms = parameter_norms(model)
    assert list(norms) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert norms[name] == pytest.approx(exact(parameter), rel=1e-12)
    everything = torch.cat([parameter.flatten() for parameter in model.parameters()])
    assert total_norm(norms) == pytest.approx(exact(everything), rel=1e-12)


def test_a_tied_parameter_is_named_and_counted_once() -> None:
    model = Tied()
    norms = parameter_norms(model)
    assert list(norms) == ["embed.weight", "middle.weight", "middle.bias"]
    assert total_norm(norms) == pytest.approx(math.hypot(*map(exact, model.parameters())), rel=1e-12)
    assert len(parameter_norms([model, model])) == 3, "nor twice over chunks that share it"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_low_precision_is_accumulated_in_float64(dtype: torch.dtype) -> None:
    values = torch.full((100_000,), 0.1, dtype=dtype)
    (norm,) = parameter_norms(model_of(values)).values()
    assert norm == pytest.approx(values[0].double().item() * math.sqrt(100_000), rel=1e-12)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3e38, torch.float32),
        (1e-44, torch.float32),
        (60_000.0, torch.float16),
        (3e38, torch.bfloat16),
        (1e300, torch.float64),
        (1e-300, torch.float64),
    ],
)
def test_huge_and_tiny_values_neither_overflow_nor_vanish(value: float, dtype: torch.dtype) -> None:
    values = torch.full((4, 4), value, dtype=dtype)
    (norm,) = parameter_norms(model_of(values)).values()
    assert norm == pytest.approx(4 * values[0, 0].double().item(), rel=1e-6)
    norms = parameter_norms(model_of(values, values.clone()))
    assert total_norm(norms) == pytest.approx(math.sqrt(32) * values[0, 0].double().item(), rel=1e-6)


@pytest.mark.parametrize("shape", [(7, 5), (35,), (1, 35)])
def test_large_tensors_are_measured_in_pieces(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_norms_module, "_PIECE", 10)
    values = torch.arange(35.0).reshape(shape)
    (norm,) = parameter_norms(model_of(values)).values()
    assert norm == pytest.approx(exact(values), rel=1e-12)
    assert local_norms({"w": values}, math.inf).values.tolist() == [34.0]


def test_not_a_number_is_shown() -> None:
    norms = parameter_norms(model_of(torch.tensor([1.0, math.nan]), torch.tensor([math.inf]), torch.tensor([2.0])))
    values = [*norms.values()]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, 2.0]


def test_empty_sparse_and_complex_tensors() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [3.0, 1.0, 3.0], (4,), check_invariants=True)
    tensors = {"empty": torch.zeros(0, 3), "sparse": sparse, "complex": torch.tensor([3 + 4j])}
    assert local_norms(tensors).values.tolist() == [0.0, 5.0, 5.0]
    assert local_norms({"empty": torch.zeros(0)}, math.inf).values.tolist() == [0.0]


def test_nothing_waits_for_the_device_until_the_norms_are_wanted() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    with OpCounter() as counter:
        local_parameter_norms(model)
    assert HOST_READS.isdisjoint(counter.names)


def test_frozen_parameters_count_as_weights_and_have_no_gradient() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    model(torch.ones(1, 3)).sum().backward()
    assert list(parameter_norms(model)) == ["weight", "bias"]
    assert gradient_norms(model) == {"weight": pytest.approx(math.sqrt(6))}


def test_the_main_gradient_is_taken_where_there_is_one() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.ones(1, 2)
    model.weight.main_grad = torch.tensor([[3.0, 4.0]])
    assert gradient_norms(model) == {"weight": 5.0}


def chunks(*norms: float) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for norm in norms:
        module = nn.Linear(1, 1, bias=False)
        module.weight.main_grad = torch.tensor([[norm]])
        modules.append(module)
    return modules


def test_the_report_of_several_chunks_has_the_true_global_norm() -> None:
    assert report_l2_norm_grad(chunks(3.0, 4.0))["l2_norm/grad/global"] == pytest.approx(5.0)
    report = report_l2_norm_grad(chunks(*map(float, range(10))))
    assert report["l2_norm/grad/global"] == pytest.approx(16.88194, rel=1e-6)
    assert report["l2_norm/grad/weight"] == 0.0, "the first of a name keeps it"
    assert report["l2_norm/grad/chunks.9.weight"] == 9.0
    assert list(report)[-1] == "l2_norm/grad/global"


def test_the_report_of_one_module_and_of_none_with_gradients() -> None:
    (module,) = chunks(2.0)
    assert report_l2_norm_grad(module) == {"l2_norm/grad/weight": 2.0, "l2_norm/grad/global": 2.0}
    assert report_l2_norm_grad(nn.Linear(2, 2)) == {"l2_norm/grad/global": 0.0}


def test_chunks_of_a_pipeline_are_merged_by_name() -> None:
    first, second = nn.ModuleDict({"embed": nn.Linear(2, 2)}), nn.ModuleDict({"head": nn.Linear(2, 2, bias=False)})
    assert list(named_parameters([first, second])) == ["embed.weight", "embed.bias", "head.weight"]


def test_wrappers_leave_no_trace_in_names() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))
    expected = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(parameter_norms(inner)) == expected
    assert list(parameter_norms(torch.compile(inner))) == expected


def test_what_has_no_values_is_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    model.register_parameter("packed", nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False))
    assert list(parameter_norms(model)) == ["1.weight", "1.bias"]
    assert missing_parameters(model) == {
        "packed": "of dtype uint8",
        "0.weight": "on the meta device",
        "0.bias": "on the meta device",
    }
    once = MissingOnce("NormLogger")
    for _ in range(2):
        once.say(model)
    assert len(caplog.messages) == 1
    assert "NormLogger skips 3 parameters" in caplog.text
    assert "0.weight (on the meta device)" in caplog.text
