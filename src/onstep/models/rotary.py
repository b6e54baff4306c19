"""Rotary position embeddings: a query or key at position p is turned by angles proportional to p."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class RotaryTables(nn.Module):
    """Cosines and sines of all positions, computed once.

    The tables are float32 whatever the dtype of the model, are not part of the state dict, and grow when a sequence
    longer than `length` comes. Every move of the module (`.to`, `.to_empty`, `.bfloat16`) computes them anew, so that a
    model built on the meta device, or one that was bfloat16 for a while, has exact tables.

    Source: Su et al., "RoFormer" (2021), equation 15, with the frequency pairs in two halves of a head, as in
    `transformers`' Llama.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, base: float, length: int) -> None:
        super().__init__()
        self._head_width = head_width
        self._base = base
        self._compute(length, torch.device("cpu"))

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions `start` to `start + length`, each (length, 1, head_width / 2)."""
        end = start + length
        if end > self.cos.shape[0]:
            self._compute(max(end, 2 * self.cos.shape[0]), self.cos.device)
        return self.cos[start:end], self.sin[start:end]

    @torch.inference_mode(False)  # tables that grew during inference may serve training next
    def _compute(self, length: int, device: torch.device) -> None:
        # float32 from the first operation: at far positions the rounding must be that of `transformers`
        exponents = torch.arange(0, self._head_width, 2, dtype=torch.float32, device="cpu") / self._head_width
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, 1.0 / self._base**exponents).unsqueeze(1)
        self.register_buffer("cos", angles.cos().to(device), persistent=False)
        self.register_buffer("sin", angles.sin().to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._compute(self.cos.shape[0], self.cos.device)
        return self


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x` (batch, seq, heads, head_width) by the angles of its positions; the dtype stays.

    Element i of the first half of a head and element i of the second half form a pair.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
