"""What sequences that hold several documents say about where each ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORE_INDEX = -100
"""A label that has no loss."""

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Boundaries:
    """How the end token of a document is treated."""

    end_id: int
    masks_loss: bool = False
    """No loss at the end token's own position, where the label is the first token of another document."""
    resets_attention: bool = False
    """Add `document_ids` and `position_ids` to a batch: attention within documents, positions from 0 in each."""

    def mark(self, tokens: _Ids, labels: _Ids) -> dict[str, _Ids]:
        """What a batch of `tokens` and `labels` (batch, seq) gains; `labels` are changed in place.

        A document reaches to its end token, which is the last of it.
        """
        ends = tokens == self.end_id
        if self.masks_loss:
            labels[ends] = IGNORE_INDEX
        if not self.resets_attention:
            return {}
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        return {"position_ids": positions_from(begins), "document_ids": np.cumsum(begins, axis=1, dtype=np.int64)}


def positions_from(begins: npt.NDArray[Any]) -> _Ids:
    """Positions (batch, seq) that count from 0 wherever `begins` (batch, seq) is True, and from the first token."""
    counter = np.broadcast_to(np.arange(begins.shape[1], dtype=np.int64), begins.shape)
    return counter - np.maximum.accumulate(np.where(begins, counter, 0), axis=1)
