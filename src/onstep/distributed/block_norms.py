"""Computes the L2 norms of tensors, by blocks where torch's own sum would lose digits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 2**15
"""Elements whose squares torch may add up by itself on a CPU."""


def norms_of(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor] | tuple[Tensor, ...]:
    """The L2 norm of each tensor, 0-d on its device; the host does not wait for it.

    They are those of `torch._foreach_norm` to the bit, except for tensors of more than `BLOCK` elements on a CPU, where
    torch adds the squares to one float32 sum, one after the other. Its norm of 10^6 elements is 1e-5 off, that of 10^8
    1e-2, and ranks that divide a tensor would have another norm than one process. Here, the norm of such a tensor is
    that of the norms of its blocks, which is 1e-7 off.

    Args:
        tensors: the tensors; at least one.
        dtype: in which squares are added up and norms are returned; None: the type of each tensor.
    """
    are_long = [one.numel() > BLOCK and one.is_cpu and one.layout is torch.strided for one in tensors]
    if not any(are_long):
        return torch._foreach_norm(list(tensors), 2.0, dtype)
    return [
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(blocks), 2.0, dtype)))
        for blocks in (
            torch.split(one.reshape(-1), BLOCK) if is_long else (one,)
            for one, is_long in zip(tensors, are_long, strict=True)
        )
    ]
