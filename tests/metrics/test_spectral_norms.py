"""Spectral norms against singular value decompositions, and what they leave alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep.checkpoint import decode_state, encode_state
from onstep.errors import ConfigError
from onstep.metrics.norms.named_parameters import missing_parameters
from onstep.metrics.norms.spectral_norms import SpectralNorms


def exact(tensor: Tensor) -> float:
    return float(torch.linalg.matrix_norm(tensor.detach().double().reshape(tensor.shape[0], -1), 2))


def with_values(values: Tensor, rows: int, columns: int) -> Tensor:
    """A random matrix with the given singular values."""
    generator = torch.Generator().manual_seed(rows + columns)
    gaussian = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(gaussian, full_matrices=False)
    return ((left * values.double()) @ right).float()


def measure(tensor: Tensor, num_steps: int = 10, times: int = 1) -> float:
    spectral = SpectralNorms(num_steps)
    model = nn.ParameterDict({"w": nn.Parameter(tensor)})
    for _ in range(times):
        norms = spectral.measure(model)
    return norms["w"]


SPECTRA: dict[str, Any] = {
    "falls by 1e12": lambda count: torch.logspace(0, -12, count),
    "falls linearly": lambda count: torch.linspace(1, 0, count),
    "two close at the top": lambda count: torch.cat([torch.tensor([1.0, 0.9999]), torch.full((count - 2,), 0.9)]),
    "all close": lambda count: torch.linspace(1, 0.98, count),
    "one a little above many": lambda count: torch.cat([torch.tensor([1.02]), torch.ones(count - 1)]),
    "all equal": torch.ones,
    "rank 3": lambda count: torch.cat([torch.tensor([3.0, 2.9, 1.0]), torch.zeros(count - 3)]),
    "rank 1": lambda count: torch.cat([torch.tensor([3.0]), torch.zeros(count - 1)]),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("shape", [(96, 96), (400, 120), (120, 400), (8, 500)])
@pytest.mark.parametrize("name", SPECTRA)
def test_within_one_percent_of_the_decomposition(name: str, shape: tuple[int, int], times: int) -> None:
    matrix = with_values(SPECTRA[name](min(shape)), *shape)
    assert measure(matrix, times=times) == pytest.approx(exact(matrix), rel=0.01)


@pytest.mark.parametrize("shape", [(700, 700), (1000, 300), (300, 1000), (50, 2000), (1, 40), (40, 1), (2, 3)])
@pytest.mark.parametrize("num_steps", [1, 10])
def test_random_matrices(shape: tuple[int, int], num_steps: int) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    norm, true = measure(matrix, num_steps), exact(matrix)
    assert norm == pytest.approx(true, rel=0.01)
    assert norm <= true * (1 + 1e-5), "an estimate from below"


def test_convolutions_zero_vectors_scalars_and_nothing() -> None:
    kernel = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    tensors = {"kernel": kernel, "zero": torch.zeros(5, 5), "vector": torch.tensor([1.0, -3.0]), "empty": torch.ones(0)}
    tensors |= {"scalar": torch.tensor(-2.0), "no_columns": torch.ones(3, 0)}
    model = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in tensors.items()})
    norms = SpectralNorms().measure(model)
    assert list(norms) == list(model)
    assert norms.pop("kernel") == pytest.approx(exact(kernel), rel=0.01)
    assert norms == {"zero": 0.0, "vector": 3.0, "empty": 0.0, "scalar": 2.0, "no_columns": 0.0}


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        (torch.float32, 1e36),
        (torch.float32, 1e-36),
        (torch.float64, 1.0),
        (torch.float64, 1e300),
        (torch.float64, 1e-310),
        (torch.bfloat16, 1.0),
        (torch.float8_e4m3fn, 1.0),
        (torch.float8_e5m2, 1.0),
    ],
)
def test_huge_and_tiny_values_and_every_precision(dtype: torch.dtype, factor: float) -> None:
    drawn = torch.float64 if dtype is torch.float64 else torch.float32
    matrix = torch.randn(60, 40, generator=torch.Generator().manual_seed(1), dtype=drawn).to(dtype)
    norm = measure(matrix if factor == 1.0 else matrix * factor)
    assert norm / factor == pytest.approx(exact(matrix.to(drawn)), rel=0.01)  # `approx` takes 1e-310 for 0


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(60, 40), (30, 90), (2, 2)])
def test_complex_matrices(shape: tuple[int, int], dtype: torch.dtype, times: int) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    true = float(torch.linalg.matrix_norm(matrix.to(torch.complex128), 2))
    assert measure(matrix, times=times) == pytest.approx(true, rel=0.01)


def test_a_complex_matrix_whose_transpose_is_not_its_adjoint() -> None:
    matrix = torch.tensor([[1.0, 1j], [1j, -1.0]])  # squares to zero; its norm is 2
    assert measure(matrix) == pytest.approx(2.0, rel=1e-5)


def test_complex_and_float8_states_are_of_types_that_a_checkpoint_holds_and_give_the_same_bits() -> None:
    tensors = [torch.randn(40, 30, dtype=torch.complex128), torch.randn(40, 30).to(torch.float8_e4m3fn)]
    model = nn.ParameterDict({str(number): nn.Parameter(one, False) for number, one in enumerate(tensors)})
    spectral, resumed = SpectralNorms(), SpectralNorms()
    spectral.measure(model)
    resumed.load_state_dict(decode_state(*encode_state(spectral.state_dict())))
    assert resumed.measure(model) == spectral.measure(model)


def test_packed_float4_is_left_out() -> None:
    packed = torch.zeros(4, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    model = nn.ParameterDict({"packed": nn.Parameter(packed, requires_grad=False), "plain": torch.eye(2)})
    assert list(SpectralNorms().measure(model)) == ["plain"]
    assert "float4" in missing_parameters(model)["packed"]


def test_an_infinity_makes_the_norm_infinite_unless_there_is_a_not_a_number_too() -> None:
    infinite, both = torch.eye(4), torch.eye(4)
    infinite[1, 2], both[0, 0], both[1, 1] = -math.inf, math.inf, math.nan
    model = nn.ParameterDict(
        {"infinite": infinite, "both": both, "bad": torch.full((4, 4), math.nan), "good": torch.eye(4)}
    )
    spectral = SpectralNorms()
    for _ in range(2):
        norms = spectral.measure(model)
        assert norms["infinite"] == math.inf
        assert math.isnan(norms["both"])
        assert math.isnan(norms["bad"])
        assert norms["good"] == pytest.approx(1.0)


def test_many_matrices_of_few_shapes_are_measured_together_each_by_its_name() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(20, 30 if number % 2 else 20) for number in range(9)])
    norms = SpectralNorms().measure(model)
    assert list(norms) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        true = exact(parameter) if parameter.dim() == 2 else parameter.abs().max().item()
        assert norms[name] == pytest.approx(true, rel=0.01)


def test_a_value_that_outgrows_the_one_known_is_found() -> None:
    values = torch.linspace(0.5, 0, 200)
    values[:2] = torch.tensor([1.0, 0.9])
    spectral = SpectralNorms()
    model = nn.ParameterDict({"w": nn.Parameter(with_values(values, 200, 200))})
    assert spectral.measure(model)["w"] == pytest.approx(1.0, rel=1e-3)
    values[1] = 1.04
    with torch.no_grad():
        model["w"].copy_(with_values(values, 200, 200))
    assert spectral.measure(model)["w"] == pytest.approx(1.04, rel=1e-3)


def count_products(spectral: SpectralNorms, model: nn.Module) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_product = func.overloadpacket.__name__ == "bmm" and (50, 70) in [tuple(one.shape[1:]) for one in args]
            self.count += is_product
            return func(*args, **(kwargs or {}))

    with Products() as products:
        spectral.measure(model)
    return products.count


def test_the_first_measurement_takes_twice_the_iterations_and_a_resumed_one_does_not() -> None:
    values = torch.cat([torch.tensor([1.0]), torch.full((49,), 0.3)])
    model = nn.ParameterDict({"w": nn.Parameter(with_values(values, 50, 70))})
    spectral = SpectralNorms(num_steps=4)
    assert count_products(spectral, model) == 2 * 8
    resumed = SpectralNorms(num_steps=4)
    resumed.load_state_dict(spectral.state_dict())
    assert count_products(spectral, model) == 2 * 4
    assert count_products(resumed, model) == 2 * 4


def test_a_resumed_measurement_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    model = nn.Linear(60, 50)
    spectral, resumed = SpectralNorms(), SpectralNorms()
    spectral.measure(model)
    resumed.load_state_dict(spectral.state_dict())
    assert resumed.measure(model) == spectral.measure(model)


def test_a_state_of_other_shapes_is_ignored() -> None:
    spectral = SpectralNorms()
    spectral.measure(nn.Linear(6, 5))
    other = nn.Linear(6, 9)
    assert spectral.measure(other)["weight"] == pytest.approx(exact(other.weight), rel=0.01)


def test_no_random_number_of_the_training_is_drawn() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    spectral, model = SpectralNorms(), nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 400))
    torch.set_rng_state(before)
    spectral.measure(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("wrong", [0, 1.5, "10", True, None])
def test_iterations_that_are_no_whole_number_above_zero_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_steps must be an integer >= 1, got {wrong!r}"):
        SpectralNorms(wrong)
