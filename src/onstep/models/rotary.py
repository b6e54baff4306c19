"""Rotary position embeddings: a query or key at position p is turned by angles proportional to p."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from onstep.models.rope_scaling import is_dynamic, rotary_frequencies


class RotaryTables(nn.Module):
    """Cosines and sines of all positions, computed once.

    The tables are float32 whatever the dtype of the model, are not part of the state dict, and grow when a sequence
    longer than `length` comes. Every move of the module (`.to`, `.to_empty`, `.bfloat16`) computes them anew, so that a
    model built on the meta device, or one that was bfloat16 for a while, has exact tables.

    Args:
        length: positions to have ready, and with dynamic scaling the length from which on the angles shrink.
        scaling: `model.rope_scaling`.

    Source: Su et al., "RoFormer" (2021), equation 15, with the frequency pairs in two halves of a head, as in
    `transformers`' Llama.
    """

    cos: Tensor
    sin: Tensor
    frequencies: Tensor

    def __init__(self, head_width: int, base: float, length: int, scaling: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._head_width = head_width
        self._base = base
        self._length = length
        self._scaling = scaling
        self._is_dynamic = is_dynamic(scaling)
        self._compute(length, torch.device("cpu"))

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions `start` to `start + length`, each (length, 1, head_width / 2)."""
        end = start + length
        if not self.keeps_angles(end):
            frequencies, _ = self._of_length(end)
            return _turns(
                torch.arange(start, end, dtype=torch.float32, device="cpu"), frequencies, 1.0, self.cos.device
            )
        if end > self.cos.shape[0]:
            self._compute(max(end, 2 * self.cos.shape[0]), self.cos.device)
        return self.cos[start:end], self.sin[start:end]

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `position_ids` (batch, seq), each (batch, seq, 1, head_width / 2).

        Positions may have any value. With dynamic scaling the length is that of the sequence, not the largest position.
        """
        length, frequencies = position_ids.shape[-1], self.frequencies
        if not self.keeps_angles(length):
            frequencies = self._of_length(length)[0].to(position_ids.device)
        return _turns(position_ids.float(), frequencies, self._factor, position_ids.device)

    def keeps_angles(self, length: int) -> bool:
        """Whether a sequence of `length` positions has the angles of a short one: always, but for dynamic scaling."""
        return length <= self._length or not self._is_dynamic

    def _of_length(self, length: int) -> tuple[Tensor, float]:
        return rotary_frequencies(self._head_width, self._base, self._scaling, self._length, length)

    @torch.inference_mode(False)  # tables that grew during inference may serve training next
    def _compute(self, length: int, device: torch.device) -> None:
        frequencies, self._factor = self._of_length(self._length)
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        cos, sin = _turns(positions, frequencies, self._factor, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._compute(self.cos.shape[0], self.cos.device)
        return self


def _turns(positions: Tensor, frequencies: Tensor, factor: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (...), each (..., 1, head_width / 2), on `device`."""
    # float32 from the first operation: at far positions the rounding must be that of `transformers`
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(device), sin.to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x` (batch, seq, heads, head_width) by the angles of its positions; the dtype stays.

    Element i of the first half of a head and element i of the second half form a pair.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
