"""Implements rotary position embeddings, plain and with context extension (linear, dynamic, YaRN, Llama 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

_BETA_FAST, _BETA_SLOW = 32.0, 1.0
"""Rotations within the original length above which YaRN keeps a frequency, and below which it interpolates it fully."""

_MOST_PRECOMPUTED = 2**20
"""Number of positions; a `config.json` may claim any number of them."""


def scaling_type(scaling: Mapping[str, Any] | None) -> str:
    """`rope_type` of a `rope_scaling`, or `type` as in older files; "default" for None."""
    return "default" if not scaling else str(scaling.get("rope_type", scaling.get("type", "default")))


def yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """The factor of cosines and sines that keeps attention as sharp as on short sequences.

    Source: Peng et al., "YaRN" (2023), equation 22; `mscale` and `mscale_all_dim` as in DeepSeek-V2.
    """
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor, over, under = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if over and under:
        return _sharpening(factor, over) / _sharpening(factor, under)
    return _sharpening(factor, 1.0)


def _sharpening(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _plain(head_width: int, base: float) -> Tensor:
    return 1.0 / _wavelengths(head_width, base)


def _wavelengths(head_width: int, base: float) -> Tensor:
    """Positions per radian for each frequency pair of a head."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu") / head_width
    return torch.pow(base, exponents)


def _llama3(plain: Tensor, scaling: Mapping[str, Any], original: float) -> Tensor:
    """Keep high frequencies, divide low ones by the factor, and interpolate between them.

    Source: Llama 3.1's model card and code (Meta, 2024): the bounds are `low_freq_factor` and `high_freq_factor`
    rotations within the original length.
    """
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original / (2 * math.pi / plain)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    blended: Tensor = (1 - share) * plain / factor + share * plain
    return blended


def _yarn(head_width: int, base: float, scaling: Mapping[str, Any], original: float) -> Tensor:
    """Interpolate, with a ramp over the pairs, between plain frequencies and those divided by the factor.

    Source: Peng et al., "YaRN" (2023), section 3.2.
    """
    low = _pair_with_turns(scaling.get("beta_fast") or _BETA_FAST, head_width, base, original)
    high = _pair_with_turns(scaling.get("beta_slow") or _BETA_SLOW, head_width, base, original)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_width - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    pairs = torch.arange(head_width // 2, dtype=torch.float32, device="cpu")
    stretched = ((pairs - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(head_width, base)
    slow, fast = 1.0 / (scaling["factor"] * wavelengths), 1.0 / wavelengths
    blended: Tensor = slow * stretched + fast * (1 - stretched)
    return blended


def _pair_with_turns(turns: float, head_width: int, base: float, length: float) -> float:
    """The (fractional) index of the pair that makes `turns` rotations within `length` positions."""
    return head_width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))


class RotaryTables(nn.Module):
    """Precomputed cosines and sines of all positions.

    The tables are float32 regardless of the model's dtype, are not part of the state dict, and grow when a sequence
    exceeds `length`. They are recomputed whenever the module is moved or cast (`.to`, `.to_empty`, `.bfloat16`), so
    they are exact even for a model that was built on the meta device or was temporarily bfloat16.

    Args:
        length: number of positions to precompute; with dynamic scaling, the length beyond which the angles shrink.
        scaling: `model.rope_scaling`; None scales nothing.

    Source: Su et al., "RoFormer" (2021), equation 15, with the two elements of a pair in separate halves of the head,
    as in `transformers`' Llama.
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
        self._is_dynamic = scaling_type(scaling) == "dynamic"
        self._compute(min(length, _MOST_PRECOMPUTED), torch.device("cpu"))

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions `start` to `start + length`, each (length, 1, head_width / 2)."""
        end = start + length
        if not self.keeps_angles(end):
            positions = torch.arange(start, end, dtype=torch.float32, device="cpu")
            return _turns(positions, self._of_length(end)[0], 1.0, self.cos.device)
        if end > self.cos.shape[0]:
            self._compute(max(end, 2 * self.cos.shape[0]), self.cos.device)
        return self.cos[start:end], self.sin[start:end]

    def at(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `position_ids` (batch, seq), each (batch, seq, 1, head_width / 2).

        Positions may have any value. With dynamic scaling, the sequence length counts, not the largest position.
        """
        length, frequencies = position_ids.shape[-1], self.frequencies
        if not self.keeps_angles(length):
            frequencies = self._of_length(length)[0].to(position_ids.device)
        return _turns(position_ids.float(), frequencies, self._factor, position_ids.device)

    def keeps_angles(self, length: int) -> bool:
        """Whether a sequence of `length` positions has a short one's angles: always, except with dynamic scaling."""
        return length <= self._length or not self._is_dynamic

    def _of_length(self, length: int) -> tuple[Tensor, float]:
        """Rotation angles per position of the pairs of a head, (head_width / 2), in radians, float32 on the CPU, for a
        sequence of `length` positions; and the factor of cosines and sines (1 except for YaRN)."""
        scaling, kind = self._scaling, scaling_type(self._scaling)
        if scaling is None or kind == "default":
            return _plain(self._head_width, self._base), 1.0
        if kind == "linear":
            return _plain(self._head_width, self._base) / scaling["factor"], 1.0
        if kind == "dynamic":
            # A base that grows with the length, so that only low frequencies are interpolated ("NTK-aware"). Source:
            # Peng et al., "YaRN" (2023), sections 3.1 and 3.3
            factor = scaling["factor"]
            stretch = factor * max(length, self._length) / self._length - (factor - 1)
            base = float(self._base * stretch ** (self._head_width / (self._head_width - 2)))
            return _plain(self._head_width, base), 1.0
        original = scaling.get("original_max_position_embeddings") or self._length
        if kind == "llama3":
            return _llama3(_plain(self._head_width, self._base), scaling, original), 1.0
        return _yarn(self._head_width, self._base, scaling, original), yarn_attention_factor(scaling)

    @torch.inference_mode(False)  # tables that grow during inference may be used in training later
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
    # float32 from the first operation: at large positions, the rounding must match that of `transformers`
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    return cos.to(device), sin.to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` (batch, seq, heads, head_width) by the angles of its positions; the dtype is preserved.

    Element i of the first half of a head and element i of the second half form a pair.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)
