"""Numbers in the microscaling format MXFP8 (OCP, 1.0): blocks of 32 with one shared power of two, emulated in torch.

An element is a float8_e4m3fn: at most 448, at least 2^-9 but for 0. The scale of a block is a float8_e8m0fnu: 2^-127 to
2^127, or NaN. 32 numbers are 33 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Numbers with one scale."""
LARGEST = 448.0
"""The largest element."""
_LARGEST_EXPONENT = 8
"""That of the largest power of two among the elements."""
_SMALLEST, _GREATEST = -127, 127
"""Exponents of scales."""


@dataclass(frozen=True)
class MXFP8:
    """A tensor in blocks of 32 consecutive elements; the last block is padded with zeros."""

    elements: Tensor
    """(blocks, 32), float8_e4m3fn."""
    scales: Tensor
    """(blocks,), float8_e8m0fnu."""
    shape: torch.Size
    """The shape of what was quantized."""

    @property
    def num_bytes(self) -> int:
        """The bytes of elements and scales."""
        return self.elements.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, each an element multiplied by the scale of its block.

        Args:
            dtype: of the result; exact in float32 but for scales below 2^-117, whose smallest products are rounded.
        """
        scales = self.scales.to(torch.float32)[:, None]
        flat = (self.elements.to(torch.float32) * scales).flatten()[: math.prod(self.shape)]
        return flat.view(self.shape).to(dtype)


@torch.no_grad()
def quantize(tensor: Tensor) -> MXFP8:
    """The tensor in MXFP8, rounded to nearest, ties to even.

    As the specification proposes, the shared exponent of a block is that of its largest magnitude, less 8. Magnitudes
    beyond 448 times the scale (they are less than 512 times) become 448 times. A block with a number that is not finite
    is NaN.

    Args:
        tensor: floating-point numbers of any shape; float64 is rounded to float32 first.
    """
    flat = tensor.detach().to(torch.float32).flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1)
    is_finite = largest.isfinite()
    _, exponents = torch.frexp(torch.where(is_finite, largest, 1.0))  # largest = mantissa in [0.5, 1) * 2^exponent
    shared = torch.where(largest == 0, _SMALLEST, exponents - 1 - _LARGEST_EXPONENT).clamp(_SMALLEST, _GREATEST)
    scaled = torch.ldexp(blocks, -shared[:, None])
    elements = torch.where(is_finite[:, None], scaled.clamp(-LARGEST, LARGEST), math.nan).to(torch.float8_e4m3fn)
    codes = torch.where(is_finite, shared + 127, 255).to(torch.uint8)  # the bits are the biased exponent; 255 is NaN
    return MXFP8(elements, codes.view(torch.float8_e8m0fnu), tensor.shape)


def rounded(tensor: Tensor) -> Tensor:
    """What is left of a tensor that is quantized and dequantized, in its own type.

    Args:
        tensor: floating-point numbers of any shape.
    """
    return quantize(tensor).dequantize(tensor.dtype)
