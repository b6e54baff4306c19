"""Allocates all parameters of a fragment at once, and gives free memory back to the system.

One large block goes back as soon as nobody reads it. Many small ones stay with the process as holes between others that
are in use, which can be as large as the model.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onstep.diloco.codec import master_dtype
from onstep.diloco.protocol.messages import ParameterSpec

_ALIGNMENT = 64


def allocate(specs: Sequence[ParameterSpec]) -> dict[str, Tensor]:
    """Tensors by name, in float32 or float64, in one block of memory; their values are not defined."""
    size = sum(map(_padded_bytes, specs))
    block = torch.from_numpy(np.empty(size, np.uint8))  # which asks for huge pages, so that touching it costs little
    parameters: dict[str, Tensor] = {}
    position = 0
    for spec in specs:
        one = block[position : position + _bytes(spec)]
        parameters[spec.name] = one.view(master_dtype(spec.dtype)).view(spec.shape)
        position += _padded_bytes(spec)
    return parameters


def release_holes() -> None:
    """Give memory that was freed, but is still with the process, back to the system; where the C library can."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; musl has none, and no holes of this kind
        if trim is not None:
            trim(0)


def _bytes(spec: ParameterSpec) -> int:
    return math.prod(spec.shape) * master_dtype(spec.dtype).itemsize


def _padded_bytes(spec: ParameterSpec) -> int:
    return -(-_bytes(spec) // _ALIGNMENT) * _ALIGNMENT
