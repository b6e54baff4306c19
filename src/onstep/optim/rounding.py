"""Rounds float32 numbers to bfloat16: stochastically, or with the 16 bits that are lost kept beside them.

A bfloat16 number is the upper half of a float32 number, so both are operations on the bits.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

_LOWER, _HALF = 0xFFFF, 0x8000


def round_stochastically(values: Tensor, generator: torch.Generator) -> None:
    """Round to numbers of bfloat16, in place: up or down, so that the expectation is the number itself.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision" (2015), section 3; Zamirai et al.,
    "Revisiting BFloat16 Training" (2020), section 3.

    Args:
        values: float32, contiguous.
        generator: of the same device; 16 bits are drawn for each number.
    """
    drawn = torch.empty((values.numel() + 3) // 4, dtype=torch.int64, device=values.device)
    drawn.random_(-(2**63), None, generator=generator)
    below_one = drawn.view(torch.int16)[: values.numel()].to(torch.int32).bitwise_and_(_LOWER)
    values.view(torch.int32).add_(below_one.view_as(values)).bitwise_and_(~_LOWER)


def split_remainder(values: Tensor) -> Tensor:
    """Round to the nearest numbers of bfloat16, in place; returns the rest of the bits, int32 of 16 bits.

    Args:
        values: float32, contiguous.
    """
    bits = values.view(torch.int32)
    rounded = (bits + _HALF).bitwise_and_(~_LOWER)
    remainder = bits - rounded
    bits.copy_(rounded)
    return remainder


def join_remainder(values: Tensor, remainder: Tensor) -> None:
    """Undo `split_remainder`, bit for bit, in place."""
    values.view(torch.int32).add_(remainder)


def generator_of(seed: int, step: int, device: torch.device) -> torch.Generator:
    """A generator that depends on its arguments alone."""
    digest = blake2b(f"rounding {seed} {step}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)
