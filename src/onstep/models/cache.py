"""The keys and values of positions already computed, for generation."""

from __future__ import annotations

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
