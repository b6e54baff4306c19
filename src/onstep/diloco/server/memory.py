"""Memory for all parameters of a fragment at once, which is used again when nobody reads it any more.

A server of large models lives at the edge of its memory, and touching new memory costs as much as filling it. So a
round writes its gradient, and after the outer step the new version, where an older version was.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from onstep.diloco.codec import master_dtype
from onstep.diloco.protocol.messages import ParameterSpec

_ALIGNMENT = 64


class Parameters(dict[str, Tensor]):
    """Tensors by name, in one block of memory. Whoever reads them keeps this object, after which the memory is reused."""


class Memory:
    """Hands out blocks for the same parameters, in float32 or float64."""

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        self._specs = tuple(specs)
        self._free: list[Tensor] = []

    def take(self) -> Parameters:
        """Parameters whose values are not defined."""
        try:
            block = self._free.pop()
        except IndexError:
            block = torch.empty(sum(map(_padded_bytes, self._specs)), dtype=torch.uint8)
        parameters = Parameters()
        position = 0
        for spec in self._specs:
            size = _bytes(spec)
            dtype = master_dtype(spec.dtype)
            parameters[spec.name] = block[position : position + size].view(dtype).view(spec.shape)
            position += _padded_bytes(spec)
        weakref.finalize(parameters, self._give_back, block).atexit = False
        return parameters

    def _give_back(self, block: Tensor) -> None:
        """Keep one block for the next round; further ones were for readers of older versions."""
        if not self._free:
            self._free.append(block)


def _bytes(spec: ParameterSpec) -> int:
    return math.prod(spec.shape) * master_dtype(spec.dtype).itemsize


def _padded_bytes(spec: ParameterSpec) -> int:
    return -(-_bytes(spec) // _ALIGNMENT) * _ALIGNMENT
