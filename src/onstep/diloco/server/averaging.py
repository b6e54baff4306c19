"""Averages submissions as they were received, without decoded copies of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onstep.diloco.codec.formats import decode_part
from onstep.diloco.protocol.messages import ParameterSpec

CHUNK_VALUES = 2**16
"""Elements summed at a time, so that the sum stays in the processor's cache."""


@dataclass(frozen=True)
class Contribution:
    """One submission of a round, with its weight and a factor of its own."""

    encoded: Mapping[str, Tensor]
    codec: str
    weight: float
    scale: float = 1.0


def average(
    contributions: Sequence[Contribution], specs: Sequence[ParameterSpec], result: Mapping[str, Tensor]
) -> None:
    """Write the weighted average of each parameter to `result`, in float32 (float64 for parameters in float64).

    Each contribution is multiplied by its scale, and the weights are divided by their sum. The result may be the memory
    of a contribution. The sums are made in the order of the contributions: the same ones in the same order give the
    same bits.
    """
    total = sum(one.weight for one in contributions)
    shares = [one.scale * one.weight / total for one in contributions]
    for spec in specs:
        _average(contributions, shares, spec, result[spec.name].view(-1))


def _average(
    contributions: Sequence[Contribution], shares: Sequence[float], spec: ParameterSpec, result: Tensor
) -> None:
    sums, works = torch.empty(2, min(CHUNK_VALUES, result.numel()), dtype=result.dtype)
    for start in range(0, result.numel(), CHUNK_VALUES):
        target = result[start : start + CHUNK_VALUES]
        chunk, work = sums[: target.numel()], works[: target.numel()]
        for number, (one, share) in enumerate(zip(contributions, shares, strict=True)):
            value = decode_part(one.encoded, spec, one.codec, start, work)
            if number:
                chunk.add_(value, alpha=share)
            else:
                torch.mul(value, share, out=chunk)
        target.copy_(chunk)
