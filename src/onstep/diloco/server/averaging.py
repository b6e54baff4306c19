"""Averages submissions as they were received, without decoded copies of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onstep.diloco.codec.formats import decode_one
from onstep.diloco.protocol.messages import ParameterSpec

CHUNK_VALUES = 2**16
"""Elements summed at a time, so that the sum stays in the processor's cache."""


@dataclass(frozen=True)
class Contribution:
    """One submission of a round, with its weight."""

    encoded: Mapping[str, Tensor]
    codec: str
    weight: float


def average(
    contributions: Sequence[Contribution], specs: Sequence[ParameterSpec], result: Mapping[str, Tensor]
) -> None:
    """Write the weighted average of each parameter to `result`, in float32 (float64 for parameters in float64).

    The result may be the memory of a contribution. The sums are made in the order of the contributions: the same ones
    in the same order give the same bits.
    """
    total = sum(one.weight for one in contributions)
    shares = [one.weight / total for one in contributions]
    for spec in specs:
        values = [decode_one(one.encoded, spec, one.codec).view(-1) for one in contributions]
        _average(values, shares, result[spec.name].view(-1))


def _average(values: Sequence[Tensor], shares: Sequence[float], result: Tensor) -> None:
    for start in range(0, result.numel(), CHUNK_VALUES):
        end = start + CHUNK_VALUES
        chunk = torch.mul(values[0][start:end], shares[0])
        for value, share in zip(values[1:], shares[1:], strict=True):
            chunk.add_(value[start:end], alpha=share)
        result[start:end] = chunk
