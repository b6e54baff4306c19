"""Every codec keeps every shape, bounds its error, decodes to the same bits and refuses what it did not make."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from onstep.diloco.codec.body import body_bytes, read_body, write_body
from onstep.diloco.codec.formats import decode, encode, encoded_specs
from onstep.diloco.codec.specs import InvalidTensorsError, digest, specs_of
from onstep.diloco.sizes import CODECS, encoded_bytes

SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (63,), (64,), (65,), (127,), (129,), (5, 77), (2, 3, 5, 7), (2**18 + 9,)]
BOUNDS = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7}
"""Largest error, relative to the largest element."""


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"p{index}": torch.randn(shape, generator=generator, dtype=dtype) for index, shape in enumerate(SHAPES)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", CODECS)
def test_every_shape_comes_back_within_the_bound_of_the_codec(codec: str, dtype: torch.dtype) -> None:
    original = tensors(torch.float32 if dtype.itemsize < 4 else dtype)
    original = {name: tensor.to(dtype) for name, tensor in original.items()}
    specs = specs_of(original)
    decoded = decode(read_body(write_body(encode(original, codec))), specs, codec)
    for name, tensor in original.items():
        assert decoded[name].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert decoded[name].shape == tensor.shape
        if tensor.numel():
            error = (decoded[name].double() - tensor.double()).abs().max() / tensor.double().abs().max()
            assert error <= BOUNDS[codec] * 1.001


@pytest.mark.parametrize("codec", CODECS)
def test_the_announced_sizes_are_those_sent(codec: str) -> None:
    original = tensors()
    encoded = encode(original, codec)
    assert encoded_bytes(specs_of(original), codec) == sum(tensor.nbytes for tensor in encoded.values())
    assert body_bytes(encoded) == len(write_body(encoded))
    assert {spec.name for spec in encoded_specs(specs_of(original), codec)} == set(encoded)


@pytest.mark.parametrize("codec", CODECS)
def test_extreme_values_stay_finite_and_small_ones_do_not_grow(codec: str) -> None:
    values = torch.tensor([9e29, -9e29, 1e-45, -1e-45, 1e-38, 0.0, 1.0])
    original = {"large": values, "denormal": torch.full((70,), 1e-44), "zero": torch.zeros(130)}
    decoded = decode(encode(original, codec), specs_of(original), codec)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in decoded.values())
    assert bool((decoded["denormal"].abs() <= 2e-44).all())
    assert bool((decoded["zero"] == 0).all())
    huge = {"huge": torch.tensor([9e29, -9e29, 1.0], dtype=torch.float64)}
    assert bool(torch.isfinite(decode(encode(huge, codec), specs_of(huge), codec)["huge"]).all())


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_what_an_average_would_overflow_with_is_refused(codec: str) -> None:
    huge = {"huge": torch.full((130,), -3e38)}
    with pytest.raises(InvalidTensorsError, match=r"huge: it has elements beyond 1e\+30"):
        decode(encode(huge, codec), specs_of(huge), codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_with_the_name_of_the_tensor(codec: str, bad: float) -> None:
    tensor = torch.zeros(300)
    tensor[170] = bad
    with pytest.raises(InvalidTensorsError, match=r"layer\.weight: .*NaN or infinite"):
        encode({"layer.weight": tensor}, codec)
    encoded = encode({"layer.weight": torch.ones(300)}, codec)
    poisoned = encoded.get("layer.weight::scale", encoded["layer.weight"])
    poisoned[-1] = bad
    with pytest.raises(InvalidTensorsError, match=r"layer\.weight: .*NaN or infinite"):
        decode(encoded, specs_of({"layer.weight": tensor}), codec)


def test_scales_with_which_a_level_would_overflow_are_refused() -> None:
    encoded = encode({"w": torch.ones(10)}, "int8")
    encoded["w::scale"].fill_(3e38)
    with pytest.raises(InvalidTensorsError, match=r"w: .*NaN or infinite"):
        decode(encoded, specs_of({"w": torch.ones(10)}), "int8")


def test_elements_of_a_block_do_not_depend_on_those_of_another() -> None:
    large, small = torch.full((128,), 1000.0), torch.linspace(-1e-3, 1e-3, 128)
    original = {"w": torch.cat([large, small])}
    decoded = decode(encode(original, "int8"), specs_of(original), "int8")["w"]
    assert (decoded[128:] - small).abs().max() <= 1e-3 / 127


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda e: e.pop("b"), "1 tensors are missing .first 'b'"),
        (lambda e: e.update(extra=torch.zeros(1)), "1 are not of this model .first 'extra'"),
        (
            lambda e: e.update(b=torch.zeros(3, 2)),
            r"b: codec fp32 requires F32 of shape \[2, 3\], got F32 of shape \[3, 2\]",
        ),
        (lambda e: e.update(b=torch.zeros(2, 3, dtype=torch.float16)), "got F16"),
    ],
)
def test_tensors_of_another_model_are_refused(change: object, expected: str) -> None:
    original = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
    encoded = encode(original, "fp32")
    change(encoded)  # type: ignore[operator]
    with pytest.raises(InvalidTensorsError, match=expected):
        decode(encoded, specs_of(original), "fp32")


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_body_that_is_not_complete_is_refused(cut: int) -> None:
    with pytest.raises(InvalidTensorsError, match="the body is not a tensor file"):
        read_body(write_body({"w": torch.ones(10)})[:cut])


def test_whole_numbers_cannot_be_averaged() -> None:
    with pytest.raises(InvalidTensorsError, match="step: only parameters in float64, float32"):
        specs_of({"step": torch.tensor(1)})


def test_the_digest_is_of_names_and_bytes_in_any_order() -> None:
    a, b = torch.ones(3), torch.zeros(2)
    assert digest({"a": a, "b": b}) == digest({"b": b, "a": a})
    assert digest({"a": a, "b": b}) != digest({"a": b, "b": a})
    assert digest({"a": a}) != digest({"a": a.nextafter(torch.tensor(2.0))})
