"""Averages submissions as they were received, without decoded copies of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onstep.diloco.codec.blocks import CHUNK_VALUES
from onstep.diloco.codec.formats import decode_part
from onstep.diloco.protocol.messages import ParameterSpec


@dataclass(frozen=True)
class Contribution:
    """One submission of a round, with its weight and a factor of its own."""

    encoded: Mapping[str, Tensor]
    codec: str
    weight: float
    scale: float = 1.0


class Averages:
    """The weighted averages of parameters over contributions, in float32 (float64 for parameters in float64).

    Each contribution is multiplied by its scale, and the weights are divided by their sum. The sums are made in the
    order of the contributions: the same ones in the same order give the same bits.

    Args:
        contributions: of all parameters; not copied.
    """

    def __init__(self, contributions: Sequence[Contribution]) -> None:
        total = sum(one.weight for one in contributions)
        self._shares = [(one, one.scale * one.weight / total) for one in contributions]

        self._work: dict[torch.dtype, Tensor] = {}

    def write(self, specs: Sequence[ParameterSpec], result: Mapping[str, Tensor]) -> None:
        """Write whole averages to `result`, which may be the memory of a contribution."""
        for spec in specs:
            target = result[spec.name].view(-1)
            for start in range(0, target.numel(), CHUNK_VALUES):
                piece = target[start : start + CHUNK_VALUES]
                piece.copy_(self.piece(spec, start, piece.numel(), piece.dtype))

    def piece(self, spec: ParameterSpec, start: int, size: int, dtype: torch.dtype) -> Tensor:
        """Elements of the average of a parameter, flat, from `start` on; free to use until the next call."""
        memory = self.work(dtype)[:, :size]
        total, work = memory[0], memory[1]
        for number, (one, share) in enumerate(self._shares):
            value = decode_part(one.encoded, spec, one.codec, start, work)
            if number:
                total.add_(value, alpha=share)
            else:
                torch.mul(value, share, out=total)
        return total

    def work(self, dtype: torch.dtype) -> Tensor:
        """Memory of shape (2, `CHUNK_VALUES`), which `piece` uses: new memory costs as much as the work."""
        if dtype not in self._work:
            self._work[dtype] = torch.empty(2, CHUNK_VALUES, dtype=dtype)
        return self._work[dtype]
