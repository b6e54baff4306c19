"""The emulated format MXFP8, beside a reference in float64 that knows only the specification's tables."""

from __future__ import annotations

import math

import pytest
import torch

from onstep.distributed.mxfp8 import BLOCK, quantize, rounded


def elements() -> list[float]:
    """All finite numbers of E4M3: a bias of 7, subnormals at exponent -6, and no number where all bits are set."""
    magnitudes = [
        (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    ]
    return sorted({sign * magnitude for magnitude in magnitudes for sign in (-1.0, 1.0)})


TABLE = torch.tensor(elements(), dtype=torch.float64)


def reference(block: torch.Tensor) -> torch.Tensor:
    """A block by the specification's algorithm: nearest element of the table, ties to the even mantissa."""
    exact = block.double()
    largest = float(exact.abs().max())
    if largest == 0:
        return exact
    scale = 2.0 ** max(math.floor(math.log2(largest)) - 8, -127)
    found = []
    for value in (exact / scale).clamp(-448, 448).tolist():
        distance = (TABLE - value).abs()
        nearest = TABLE[distance == distance.min()]
        found.append(min(nearest.tolist(), key=lambda one: _mantissa(one) % 2))
    return torch.tensor(found, dtype=torch.float64) * scale


def _mantissa(element: float) -> int:
    magnitude = abs(element)
    exponent = max(math.floor(math.log2(magnitude)), -6) if magnitude else -6
    return round(magnitude / 2.0 ** (exponent - 3))


def test_the_elements_are_those_of_the_specification() -> None:
    assert len(TABLE) == 253
    assert float(TABLE.max()) == 448
    assert float(TABLE[TABLE > 0].min()) == 2.0**-9
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double()
    assert sorted({*bits[bits.isfinite()].tolist()}) == TABLE.tolist()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 3e4, 1e30])
def test_a_block_equals_the_reference(scale: float) -> None:
    numbers = torch.randn(16, BLOCK, generator=torch.Generator().manual_seed(1)) * scale
    expected = torch.stack([reference(one) for one in numbers])
    torch.testing.assert_close(quantize(numbers).dequantize(torch.float64), expected, rtol=0, atol=0)


def test_halves_are_rounded_to_even_and_what_is_too_large_to_the_largest() -> None:
    block = torch.zeros(BLOCK)
    block[:6] = torch.tensor([256.0, 17.0, 19.0, -17.0, 463.0, 511.0])  # elements from 16 to 32 are 2 apart
    assert quantize(block).dequantize()[:6].tolist() == [256, 16, 20, -16, 448, 448]
    assert quantize(block).scales.float().tolist() == [1.0]


def test_numbers_below_half_of_the_smallest_element_vanish() -> None:
    block = torch.zeros(BLOCK)
    block[:4] = torch.tensor([256.0, 2.0**-10, 1.01 * 2.0**-10, 2.0**-9])
    assert quantize(block).dequantize()[1:4].tolist() == [0, 2.0**-9, 2.0**-9]


def test_a_power_of_two_times_a_block_is_the_same_block() -> None:
    numbers = torch.randn(64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(rounded(numbers * 2.0**20), rounded(numbers) * 2.0**20)
    assert torch.equal(rounded(rounded(numbers)), rounded(numbers))


def test_the_error_is_within_the_bounds_of_the_format() -> None:
    """An element has four bits: half of the last is 1/16 of it; a saturated one is off by at most 1/8."""
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(3)).double()
    error = (rounded(numbers) - numbers).abs()
    scales = quantize(numbers).scales.float().repeat_interleave(BLOCK)
    assert ((error <= numbers.abs() / 8) | (error <= scales * 2.0**-10)).all()
    normal = (numbers.abs() <= scales * 448) & (numbers.abs() >= scales * 2.0**-6)
    assert (error <= numbers.abs() / 16)[normal].all()


def test_thirty_two_numbers_are_thirty_three_bytes() -> None:
    assert quantize(torch.zeros(64, 64)).num_bytes == 4224
    assert quantize(torch.zeros(33)).num_bytes == 66


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 32), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_and_type_comes_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = torch.full(shape, 1.5, dtype=dtype)
    assert torch.equal(rounded(whole), whole)
    assert rounded(whole).dtype is dtype


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_makes_its_block_nan_and_no_other(bad: float) -> None:
    numbers = torch.ones(2 * BLOCK)
    numbers[3] = bad
    found = quantize(numbers)
    assert found.dequantize()[:BLOCK].isnan().all()
    assert found.scales.float().isnan().tolist() == [True, False]
    assert (found.dequantize()[BLOCK:] == 1).all()


def test_the_smallest_and_the_largest_numbers_keep_a_scale() -> None:
    numbers = torch.zeros(3, BLOCK)
    numbers[0, 0], numbers[1, 0], numbers[2, 0] = 2.0**-149, torch.finfo(torch.float32).max, 2.0**-120
    scales = quantize(numbers).scales.double()
    assert scales.log2().tolist() == [-127, 119, -127]
    assert quantize(numbers).dequantize()[1, 0] == 448 * 2.0**119
