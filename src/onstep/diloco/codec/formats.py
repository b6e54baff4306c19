"""Encodes tensors for the network, and checks and decodes received ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from onstep.checkpoint.format.tensor_header import DTYPE_NAMES
from onstep.diloco.codec.blocks import CHUNK_VALUES, BlockFormat, are_valid_scales
from onstep.diloco.codec.specs import InvalidTensorsError, master_dtype
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.diloco.sizes import BLOCKS, check_codec

BLOCK_FORMATS = {"int8": BlockFormat(8, BLOCKS["int8"]), "int4": BlockFormat(4, BLOCKS["int4"])}
SCALE_SUFFIX = "::scale"


LARGEST = 1e30
"""Magnitude beyond which an element is refused: sums, momentum and outer learning rates have to stay finite."""


def encode(tensors: Mapping[str, Tensor], codec: str) -> dict[str, Tensor]:
    """The encoded tensors: data under each name, and in block formats scales under `name::scale`.

    The result is on the host; with `fp32` it shares memory with tensors that are there and in float32 or float64. A
    value beyond the range of `bf16` becomes the largest one, and `ErrorFeedback` sends the rest later.

    Raises:
        InvalidTensorsError: if an element is not finite.
    """
    check_codec(codec)
    encoded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu", master_dtype(tensor.dtype)).contiguous()
        if codec in BLOCK_FORMATS:
            encoded[name], encoded[name + SCALE_SUFFIX] = BLOCK_FORMATS[codec].encode(name, plain)
        else:
            _require_finite(name, is_finite(plain))
            encoded[name] = _bf16(plain) if codec == "bf16" else plain
    return encoded


def encode_part(
    piece: Tensor, spec: ParameterSpec, codec: str, start: int, encoded: Mapping[str, Tensor], decoded: Tensor
) -> None:
    """Encode some elements of a parameter into their place in `encoded`.

    Args:
        piece: the elements, flat.
        spec: of the parameter.
        codec: any but `fp32`.
        start: index of the first element, a multiple of 128.
        encoded: all that `encode` gives for the parameter.
        decoded: like the piece; gets what it is decoded to.

    Raises:
        InvalidTensorsError: if an element is not finite.
    """
    data = encoded[spec.name].view(-1)
    if codec in BLOCK_FORMATS:
        BLOCK_FORMATS[codec].encode_part(spec.name, piece, start, data, encoded[spec.name + SCALE_SUFFIX], decoded)
    else:
        part = data[start : start + piece.numel()]
        part.copy_(encode({spec.name: piece}, codec)[spec.name])
        decoded.copy_(part)


def _bf16(tensor: Tensor) -> Tensor:
    largest = torch.finfo(torch.bfloat16).max
    cast = tensor.bfloat16()
    return cast if is_finite(cast) else tensor.clamp(-largest, largest).bfloat16()


def decode(encoded: Mapping[str, Tensor], specs: Sequence[ParameterSpec], codec: str) -> dict[str, Tensor]:
    """The tensors of `specs`, in float32 (float64 for parameters in float64); with `fp32` in the memory passed in.

    Raises:
        InvalidTensorsError: if the names, shapes or dtypes are not those that `encode` gives, or an element is not
            finite; the message names the first tensor.
    """
    check_encoded(encoded, specs, codec)
    check_values(encoded, specs, codec)
    return {spec.name: decode_one(encoded, spec, codec) for spec in specs}


def decode_one(encoded: Mapping[str, Tensor], spec: ParameterSpec, codec: str, out: Tensor | None = None) -> Tensor:
    """One tensor, of encoded ones that have passed `check_encoded` and `check_values`; in `out`, if that is given."""
    data, dtype = encoded[spec.name], master_dtype(spec.dtype)
    if codec in BLOCK_FORMATS:
        return BLOCK_FORMATS[codec].decode(data, encoded[spec.name + SCALE_SUFFIX], spec.shape, dtype, out)
    return data.to(dtype) if out is None else out.copy_(data)


def decode_part(encoded: Mapping[str, Tensor], spec: ParameterSpec, codec: str, start: int, out: Tensor) -> Tensor:
    """As many of its elements as a flat `out` has, from `start`, a multiple of 128, on; in `out`, or where they are."""
    data = encoded[spec.name].view(-1)
    if codec in BLOCK_FORMATS:
        BLOCK_FORMATS[codec].decode_part(data, encoded[spec.name + SCALE_SUFFIX], start, out)
        return out
    part = data[start : start + out.numel()]
    return part if part.dtype == out.dtype else out.copy_(part)


def norm(encoded: Mapping[str, Tensor], specs: Sequence[ParameterSpec], codec: str) -> float:
    """The L2 norm of all elements, of encoded tensors that have passed `check_encoded`; infinite if it overflows."""
    norms, work = [], torch.empty(0)
    for spec in specs:
        count = math.prod(spec.shape)
        if work.dtype != master_dtype(spec.dtype) or not work.numel():
            work = torch.empty(CHUNK_VALUES, dtype=master_dtype(spec.dtype))
        for start in range(0, count, CHUNK_VALUES):
            part = decode_part(encoded, spec, codec, start, work[: min(CHUNK_VALUES, count - start)])
            norms.append(float(torch.linalg.vector_norm(part)))
    return math.hypot(*norms)


def check_values(encoded: Mapping[str, Tensor], specs: Sequence[ParameterSpec], codec: str) -> None:
    """Raise InvalidTensorsError if a decoded element would be NaN, infinite or beyond `LARGEST`, without decoding."""
    for spec in specs:
        if codec in BLOCK_FORMATS:
            scales = encoded[spec.name + SCALE_SUFFIX]
            has_finite, factor = are_valid_scales(scales), BLOCK_FORMATS[codec].top
        else:
            scales = encoded[spec.name]
            has_finite, factor = is_finite(scales), 1
        _require_finite(spec.name, has_finite)
        if scales.numel() and factor * max(map(abs, map(float, torch.aminmax(scales)))) > LARGEST:
            raise InvalidTensorsError(
                f"{spec.name}: it has elements beyond {LARGEST:g}, with which an average overflows; lower the "
                f"learning rate."
            )


def check_encoded(encoded: Mapping[str, Tensor], specs: Sequence[ParameterSpec], codec: str) -> None:
    """Raise InvalidTensorsError unless names, shapes and dtypes are those that `encode` gives for `specs`."""
    expected = {spec.name: spec for spec in encoded_specs(specs, codec)}
    missing, unexpected = sorted(expected.keys() - encoded.keys()), sorted(encoded.keys() - expected.keys())
    if missing or unexpected:
        raise InvalidTensorsError(
            f"{len(missing)} tensors are missing{_some(missing)} and {len(unexpected)} are not of this model"
            f"{_some(unexpected)} or not of codec {codec}; all workers must train the same model."
        )
    for name, spec in expected.items():
        got = encoded[name]
        if tuple(got.shape) != spec.shape or DTYPE_NAMES.get(got.dtype) != spec.dtype:
            raise InvalidTensorsError(
                f"{name}: codec {codec} requires {spec.dtype} of shape {list(spec.shape)}, got "
                f"{DTYPE_NAMES.get(got.dtype)} of shape {list(got.shape)}."
            )


def _some(names: list[str]) -> str:
    return f" (first {names[0][:100]!r})" if names else ""


def encoded_specs(specs: Sequence[ParameterSpec], codec: str) -> tuple[ParameterSpec, ...]:
    """Names, shapes and dtypes of the tensors that `encode` returns for parameters."""
    return _encoded_specs(tuple(specs), codec)


@lru_cache(maxsize=64)
def _encoded_specs(specs: tuple[ParameterSpec, ...], codec: str) -> tuple[ParameterSpec, ...]:
    check_codec(codec)
    return tuple(item for spec in specs for item in _encoded_spec(spec, codec))


def _encoded_spec(spec: ParameterSpec, codec: str) -> tuple[ParameterSpec, ...]:
    if codec in BLOCK_FORMATS:
        form = BLOCK_FORMATS[codec]
        levels = ParameterSpec(spec.name, form.levels_shape(spec.shape), DTYPE_NAMES[form.levels_dtype])
        return levels, ParameterSpec(spec.name + SCALE_SUFFIX, (form.num_blocks(spec.shape),), "F32")
    dtype = torch.bfloat16 if codec == "bf16" else master_dtype(spec.dtype)
    return (ParameterSpec(spec.name, spec.shape, DTYPE_NAMES[dtype]),)


def _require_finite(name: str, is_finite: bool) -> None:
    if not is_finite:
        raise InvalidTensorsError(f"{name}: it has elements that are NaN or infinite, which cannot be averaged.")


def is_finite(tensor: Tensor) -> bool:
    """In one pass and without a mask: NaN and infinity show in the extremes."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(map(math.isfinite, map(float, torch.aminmax(tensor))))
