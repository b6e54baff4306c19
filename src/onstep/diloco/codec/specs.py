"""Describes the parameters of a model, and the hash that tells whether two workers have the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from blake3 import blake3
from torch import Tensor

from onstep.checkpoint.format.tensor_file import bytes_of
from onstep.checkpoint.format.tensor_header import DTYPE_NAMES
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.errors import OnstepError


class InvalidTensorsError(OnstepError, ValueError):
    """Tensors are not what the model or the codec requires, or are not finite; the message names the first."""


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[ParameterSpec, ...]:
    """Name, shape and dtype of each tensor, in the order of the names.

    Raises:
        InvalidTensorsError: for a tensor that cannot be averaged: not of floating point, complex or in 8 bits.
    """
    return tuple(_spec(name, tensors[name]) for name in sorted(tensors))


def _spec(name: str, tensor: Tensor) -> ParameterSpec:
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise InvalidTensorsError(
            f"{name}: only parameters in float64, float32, bfloat16 or float16 can be averaged, got {tensor.dtype}; "
            f"freeze it (requires_grad_(False)) or convert it."
        )
    return ParameterSpec(name, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])


def master_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype in which parameters of a dtype are averaged: float64 for float64, float32 for all others."""
    return torch.float64 if dtype in ("F64", torch.float64) else torch.float32


class Digest:
    """BLAKE3 hash of the bytes of tensors that are added in the order of their names."""

    def __init__(self) -> None:
        self._hasher = blake3(max_threads=blake3.AUTO)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor."""
        self._hasher.update(name.encode())
        self._hasher.update(bytes_of(tensor))

    def text(self) -> str:
        """64 hexadecimal digits."""
        return str(self._hasher.hexdigest())


def digest(tensors: Mapping[str, Tensor], release: Callable[[Tensor], None] = lambda tensor: None) -> str:
    """The `Digest` of all tensors.

    Args:
        tensors: by name.
        release: called with each tensor that was read.
    """
    hasher = Digest()
    for name in sorted(tensors):
        hasher.add(name, tensors[name])
        release(tensors[name])
    return hasher.text()
