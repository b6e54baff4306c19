"""Stores tensors as integers of 8 or 4 bits, with one scale per block of consecutive elements.

Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1, with evenly spaced levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from onstep.diloco.codec.specs import InvalidTensorsError

CHUNK_VALUES = 2**18
"""Elements worked on at a time, so that all passes over them find them in the processor's cache."""
_LARGEST_SCALE = torch.finfo(torch.float32).max / 128
"""With it, the element of any level is finite."""
_LEAST_DIVIDED = 1e-35
"""Elements from this on have scales that are not 0 in float32."""


@dataclass(frozen=True)
class BlockFormat:
    """A block format: element i of a block is `level[i] * scale`."""

    bits: int
    block: int
    """Elements per scale; even."""

    @property
    def top(self) -> int:
        """The largest level; the smallest is its negative."""
        return int(2 ** (self.bits - 1)) - 1

    def num_blocks(self, shape: tuple[int, ...]) -> int:
        """Scales of a tensor."""
        return -(-math.prod(shape) // self.block)

    def levels_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor of levels: the tensor's own with 8 bits, bytes of two levels with 4."""
        return shape if self.bits == 8 else (-(-math.prod(shape) // 2),)

    @property
    def levels_dtype(self) -> torch.dtype:
        """Of the tensor of levels."""
        return torch.int8 if self.bits == 8 else torch.uint8

    def encode(self, name: str, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Levels, and scales in float32 of shape `(blocks,)`.

        Raises:
            InvalidTensorsError: if an element is not finite.
        """
        shape = tuple(tensor.shape)
        flat, count = tensor.reshape(-1), tensor.numel()
        levels = torch.empty(math.prod(self.levels_shape(shape)), dtype=self.levels_dtype)
        scales = torch.empty(self.num_blocks(shape))
        for start in range(0, count, CHUNK_VALUES):
            self.encode_part(name, flat[start : start + CHUNK_VALUES], start, levels, scales)
        return levels.view(self.levels_shape(shape)), scales

    def encode_part(
        self, name: str, piece: Tensor, start: int, levels: Tensor, scales: Tensor, decoded: Tensor | None = None
    ) -> None:
        """Encode a flat piece, whose first element is the first of a block, into its place in flat levels and scales.

        Args:
            name: of the tensor, for errors.
            piece: the elements.
            start: index of the first one.
            levels: of all elements.
            scales: of all blocks.
            decoded: like the piece; gets what these levels and scales are decoded to.

        Raises:
            InvalidTensorsError: if an element is not finite.
        """
        size, first, at = piece.numel(), start // self.block, start * self.bits // 8
        whole = pad(piece, (0, -size % self.block)) if size % self.block else piece  # pad would copy it
        blocks = whole.view(-1, self.block)
        exact = torch.empty_like(blocks) if decoded is None or whole is not piece else decoded.view_as(blocks)
        theirs = scales[first : first + len(blocks)]
        self._quantize(name, blocks, theirs, exact)
        packed = exact.view(-1)[:size] if self.bits == 8 else _pack(exact.view(-1)[: size + size % 2])
        levels[at : at + packed.numel()] = packed
        if decoded is not None:
            exact.mul_(theirs[:, None].to(exact.dtype))
            if whole is not piece:
                decoded.copy_(exact.view(-1)[:size])

    def _quantize(self, name: str, blocks: Tensor, scales: Tensor, levels: Tensor) -> None:
        """Write the scales of blocks, and their levels as integers in the dtype of the blocks."""
        largest = torch.abs(blocks, out=levels).amax(1)
        lowest, highest = map(float, torch.aminmax(largest))
        if not math.isfinite(highest):
            raise InvalidTensorsError(f"{name}: it has elements that are NaN or infinite, which cannot be averaged.")
        torch.div(largest, self.top, out=largest)
        is_clipped = highest > self.top * _LARGEST_SCALE
        scales.copy_(largest.clamp_(max=_LARGEST_SCALE) if is_clipped else largest)
        divisors = scales.to(blocks.dtype)
        if lowest < _LEAST_DIVIDED:
            divisors = torch.where(scales == 0, 1.0, divisors)
        torch.div(blocks, divisors[:, None], out=levels).round_()
        if is_clipped:
            levels.clamp_(-self.top, self.top)

    def decode(
        self, levels: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """The tensor, in `dtype`: each element is one product, so every processor computes the same bits.

        Args:
            out: of this shape and dtype, to write to.
        """
        result = torch.empty(shape, dtype=dtype) if out is None else out
        flat, count = result.view(-1), math.prod(shape)
        for start in range(0, count, CHUNK_VALUES):
            self.decode_part(levels, scales, start, flat[start : start + CHUNK_VALUES])
        return result

    def decode_part(self, levels: Tensor, scales: Tensor, start: int, result: Tensor) -> None:
        """Write the elements from `start` on, the first of a block, to `result`, which is flat."""
        size, at, first = result.numel(), start * self.bits // 8, start // self.block
        piece = levels.view(-1)[at : at - (-size * self.bits // 8)]
        result.copy_(piece if self.bits == 8 else _unpack(piece)[:size])
        whole, blocks = size - size % self.block, size // self.block
        result[:whole].view(-1, self.block).mul_(scales[first : first + blocks, None].to(result.dtype))
        if whole < size:
            result[whole:].mul_(scales[first + blocks].to(result.dtype))


def are_valid_scales(scales: Tensor) -> bool:
    """Whether all elements are finite with these scales, whatever their levels."""
    return not scales.numel() or bool(scales.abs().amax() <= _LARGEST_SCALE)


def _pack(levels: Tensor) -> Tensor:
    """Two levels per byte, the first in the lower half, each plus 8."""
    halves = (levels + 8).to(torch.uint8)
    return halves[0::2] | (halves[1::2] << 4)


def _unpack(packed: Tensor) -> Tensor:
    halves = torch.empty(packed.numel(), 2, dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=halves[:, 0])
    torch.bitwise_right_shift(packed, 4, out=halves[:, 1])
    return halves.view(-1).view(torch.int8) - 8
