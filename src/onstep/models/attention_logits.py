"""The largest attention logit: it grows without bound before a training run diverges."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**24
"""Most scores held at once."""


@torch.no_grad()
def largest_logit(
    query: Tensor, key: Tensor, mask: Tensor | None = None, *, block_elements: int = _BLOCK_ELEMENTS
) -> Tensor:
    """The largest `query . key / sqrt(width)` of all pairs that attention looks at.

    Scores are computed for some queries at a time, in the dtype of the computation; no gradient.

    Args:
        query: (batch, heads, seq, width).
        key: (batch, groups, seq, width); heads are a multiple of groups.
        mask: (batch, 1, seq, seq), True where a query looks at a key; None is causal.
        block_elements: most scores held at once (but at least those of one query position).

    Returns:
        (), float32 (float64 for such queries), on the device.
    """
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    grouped = query.view(batch, groups, heads // groups, length, width)
    rows = max(1, block_elements // (batch * heads * length))
    largest = [
        _largest_of(grouped[..., start : start + rows, :], key, start, mask).amax() for start in range(0, length, rows)
    ]
    found = torch.stack(largest).amax()
    return found.to(torch.promote_types(found.dtype, torch.float32)) / math.sqrt(width)


def _largest_of(query: Tensor, key: Tensor, start: int, mask: Tensor | None) -> Tensor:
    """Scores of the queries from position `start` on, -inf where they do not look."""
    end = start + query.shape[-2]
    scores = query @ key[:, :, None, :end].transpose(-2, -1)
    if mask is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(start)
    else:
        seen = mask[:, :, None, start:end, :end]
    return scores.masked_fill_(~seen, -math.inf)
