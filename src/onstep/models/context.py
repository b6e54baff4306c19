"""What a layer must know of a sequence beside its hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onstep.models.cache import KeyValueCache


@dataclass(frozen=True)
class SequenceContext:
    """Positions, masks and earlier keys of the sequences that go through the layers; the same for all layers."""

    cos: Tensor | None = None
    """Of the rotation, (seq, 1, head_width / 2) or (batch, seq, 1, head_width / 2); None is no rotation."""
    sin: Tensor | None = None
    mask: Tensor | None = None
    """(batch, 1, seq, seq), bool, True where a query may look at a key; None is all keys up to its own position."""
    cache: KeyValueCache | None = None
    """Earlier positions, for generation."""


def document_mask(document_ids: Tensor) -> Tensor:
    """Which keys a query may look at in packed sequences: those of its own document up to its own position.

    Args:
        document_ids: (batch, seq), the same number for the tokens of one document.

    Returns:
        (batch, 1, seq, seq), bool.
    """
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return same.tril().unsqueeze(1)


def document_positions(document_ids: Tensor) -> Tensor:
    """Positions (batch, seq), int64, that count from 0 at the start of each run of equal `document_ids`."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values
