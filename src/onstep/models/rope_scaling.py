"""Frequencies of rotary positions stretched for sequences longer than those that a model was first trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_BETA_FAST, _BETA_SLOW = 32.0, 1.0
"""Turns within the original length from which on YaRN leaves a frequency alone, and below which it stretches it."""


def scaling_type(scaling: Mapping[str, Any] | None) -> str:
    """`rope_type` of a `rope_scaling`, or `type` as older files have it; "default" where there is none."""
    return "default" if not scaling else str(scaling.get("rope_type", scaling.get("type", "default")))


def is_dynamic(scaling: Mapping[str, Any] | None) -> bool:
    """Whether the frequencies change with the length of a sequence."""
    return scaling_type(scaling) == "dynamic"


def rotary_frequencies(
    head_width: int, base: float, scaling: Mapping[str, Any] | None, seq_length: int, length: int
) -> tuple[Tensor, float]:
    """Angles by which the pairs of a head turn from one position to the next.

    Args:
        scaling: a checked `model.rope_scaling`.
        seq_length: `model.seq_length`.
        length: of the sequence; only dynamic scaling depends on it.

    Returns:
        (head_width / 2), float32 on the CPU in radians, and the factor of cosines and sines (1 except for YaRN).
    """
    kind = scaling_type(scaling)
    if scaling is None or kind == "default":
        return _plain(head_width, base), 1.0
    if kind == "linear":
        return _plain(head_width, base) / scaling["factor"], 1.0
    if kind == "dynamic":
        return _plain(head_width, _dynamic_base(head_width, base, scaling["factor"], seq_length, length)), 1.0
    original = scaling.get("original_max_position_embeddings") or seq_length
    if kind == "llama3":
        return _llama3(_plain(head_width, base), scaling, original), 1.0
    return _yarn(head_width, base, scaling, original), yarn_attention_factor(scaling)


def yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """The factor of cosines and sines, which makes attention as sharp as it was on short sequences.

    Source: Peng et al., "YaRN" (2023), equation 22; `mscale` and `mscale_all_dim` as DeepSeek-V2 sets them.
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
    """Positions to one radian, for each pair of a head."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu") / head_width
    return torch.pow(base, exponents)


def _dynamic_base(head_width: int, base: float, factor: float, seq_length: int, length: int) -> float:
    """A base that grows with the length, so that only slow frequencies are stretched ("NTK-aware").

    Source: Peng et al., "YaRN" (2023), section 3.1 and appendix A.
    """
    stretch = factor * max(length, seq_length) / seq_length - (factor - 1)
    return float(base * stretch ** (head_width / (head_width - 2)))


def _llama3(plain: Tensor, scaling: Mapping[str, Any], original: float) -> Tensor:
    """Fast frequencies stay, slow ones are divided by the factor, and those between are blended.

    Source: Llama 3.1's model card and code (Meta, 2024): `low_freq_factor` and `high_freq_factor` turns within the
    original length are the bounds.
    """
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original / (2 * math.pi / plain)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    blended: Tensor = (1 - share) * plain / factor + share * plain
    return blended


def _yarn(head_width: int, base: float, scaling: Mapping[str, Any], original: float) -> Tensor:
    """A ramp over the pairs from plain frequencies to those divided by the factor.

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
    """The (fractional) pair of a head that turns so many times within `length` positions."""
    return head_width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
