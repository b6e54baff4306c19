"""What the layers know of a sequence beside its hidden states: positions, masks, and earlier keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onstep.errors import OnstepError


class KeyValueCache:
    """Room for the keys and values of `capacity` positions in each layer.

    A layer's room is taken once, at its first `append`, in the dtype and on the device of what comes (under autocast
    only the layer knows). For inference: use it under `torch.no_grad`.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        """Positions that all layers hold."""
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store `key` and `value` (batch, seq, groups, head_width) of the next positions; give all of the layer so far.

        `length` does not change until `advance`, when every layer has appended.

        Raises:
            OnstepError: more positions than the capacity.
        """
        end = self.length + key.shape[1]
        if end > self.capacity:
            raise OnstepError(
                f"the key/value cache has room for {self.capacity} positions, got {end}; give it a larger capacity."
            )
        keys = self._write(self._keys, layer, key)
        values = self._write(self._values, layer, value)
        return keys[:, :end], values[:, :end]

    def advance(self, num_positions: int) -> None:
        """Count `num_positions` as held, after every layer has appended them."""
        self.length += num_positions

    def _write(self, rooms: list[Tensor | None], layer: int, new: Tensor) -> Tensor:
        room = rooms[layer]
        if room is None:
            batch, _, groups, width = new.shape
            room = torch.empty(batch, self.capacity, groups, width, dtype=new.dtype, device=new.device)
            rooms[layer] = room
        room[:, self.length : self.length + new.shape[1]] = new
        return room


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
