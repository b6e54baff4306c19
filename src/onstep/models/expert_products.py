"""Linear maps of many experts at once: each row of the input by the matrix of its own expert."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

_ALIGNMENT_BYTES = 16
"""Rows that the grouped product reads must start at multiples of this."""

_GROUPED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}


class ExpertProduct(Protocol):
    """Multiplies rows that are ordered by expert."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x W_e^T + b_e` for the rows of each expert `e`; weights are (experts, out, in), biases (experts, out)."""
        ...


class GroupedProduct:
    """All experts in one product, for which the host need not know their loads.

    Args:
        load: (experts,), how many of the rows each expert has.
    """

    def __init__(self, load: Tensor) -> None:
        self._load = load
        self._ends = load.cumsum(0).to(torch.int32)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Rows (rows, in) to (rows, out)."""
        out = grouped_mm(x, weight.transpose(1, 2), offs=self._ends)
        if bias is not None:
            out = out + bias.repeat_interleave(self._load, dim=0, output_size=x.shape[0])
        return out


class LoopedProduct:
    """One product for each expert; the host waits for the loads."""

    def __init__(self, load: Tensor) -> None:
        self._rows: list[int] = load.tolist()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Rows (rows, in) to (rows, out). An expert without rows is multiplied too, so that it has a gradient of 0."""
        biases = [None] * len(self._rows) if bias is None else bias.unbind()
        parts = zip(torch.split(x, self._rows), weight.unbind(), biases, strict=True)
        return torch.cat([linear(*part) for part in parts])


class PaddedProduct:
    """Every expert has the same number of rows, so that no size depends on the loads."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(experts, capacity, in) to (experts, capacity, out)."""
        out = torch.bmm(x, weight.transpose(1, 2))
        return out if bias is None else out + bias.unsqueeze(1)


def can_group(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether torch has the grouped product for a device, a type and rows of these widths.

    On a GPU that is bfloat16 from compute capability 8.0 on.
    """
    if dtype not in _GROUPED_DTYPES.get(device.type, ()):
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return all(width * dtype.itemsize % _ALIGNMENT_BYTES == 0 for width in widths)
