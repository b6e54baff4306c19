"""What the layers know of a sequence beside its hidden states: positions, masks, and earlier keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onstep.errors import ConfigError, OnstepError
from onstep.models.layers.rotary import RotaryTables


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


def learned_positions(table: nn.Embedding, start: int, length: int, position_ids: Tensor | None) -> Tensor:
    """What a model with learned positions adds to the embedding of its tokens, (seq, hidden) or (batch, seq, hidden).

    Raises:
        ConfigError: positions beyond the table. Of `position_ids` on a GPU it is not asked, since that would wait for
            the device; there they are CUDA's error.
    """
    if position_ids is None:
        check_positions(table, start + length)
        return table.weight[start : start + length]
    if position_ids.device.type == "cpu" and position_ids.numel():
        least, largest = (int(one) for one in position_ids.aminmax())
        if least < 0 or largest >= table.num_embeddings:
            raise ConfigError(
                f"position_ids go from {least} to {largest}, but learned positions are those from 0 to "
                f"{table.num_embeddings - 1} (model.seq_length={table.num_embeddings}); give others, or train a model "
                "with rotary positions (position_embedding_type=rope)."
            )
    rows: Tensor = table(position_ids)
    return rows


def check_positions(table: nn.Embedding, end: int) -> None:
    """Refuse sequences that are longer than a table of learned positions.

    Raises:
        ConfigError: naming both lengths.
    """
    if end > table.num_embeddings:
        raise ConfigError(
            f"the sequence has {end} positions, but learned positions end at model.seq_length={table.num_embeddings}; "
            "shorten it, or train a model with rotary positions (position_embedding_type=rope)."
        )


def sequence_context(
    rotary: RotaryTables | None,
    tokens: Tensor,
    cache: KeyValueCache | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
) -> SequenceContext:
    """What the layers must know of `tokens`.

    Raises:
        ConfigError: documents together with a cache, or either beyond the length from which on dynamic angles change.
    """
    if cache is not None and document_ids is not None:
        raise ConfigError("document_ids and a key/value cache do not go together; generate one document at a time.")
    mask = None
    if document_ids is not None:
        mask = (document_ids.unsqueeze(2) == document_ids.unsqueeze(1)).tril().unsqueeze(1)
    if rotary is None:
        return SequenceContext(mask=mask, cache=cache)
    start = 0 if cache is None else cache.length
    end = start + tokens.shape[1]
    if cache is not None and not rotary.keeps_angles(end):
        raise ConfigError(
            f"rope_scaling of type dynamic turns all positions of a sequence of {end} tokens anew (beyond "
            "model.seq_length), so that earlier keys cannot be kept; call the model on the whole sequence without a "
            "cache."
        )
    if document_ids is not None and not rotary.keeps_angles(end):
        raise ConfigError(
            f"document_ids of a sequence of {end} tokens do not go with rope_scaling of type dynamic: beyond "
            "model.seq_length its angles follow from the length, and each document has its own; call the model on one "
            "document at a time, or on shorter sequences."
        )
    cos, sin = rotary(start, end - start) if position_ids is None else rotary.at(position_ids)
    return SequenceContext(cos, sin, mask, cache)


def chosen_positions(position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """The caller's positions (batch, seq), or those that count from 0 in each run of equal `document_ids`; None counts
    from the first token on."""
    if position_ids is not None or document_ids is None:
        return position_ids
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values
