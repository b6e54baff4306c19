"""Provides layers with the context of a sequence: positions, documents, and cached keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onstep.distributed.shards import local_weight
from onstep.errors import ConfigError, OnstepError
from onstep.models.layers.documents import Documents, documents_of, first_positions
from onstep.models.layers.rotary import RotaryTables


class KeyValueCache:
    """Holds the keys and values of up to `capacity` positions for each layer.

    The memory of a layer is allocated once, at its first `append`, with the dtype and device of the tensors appended
    (under autocast only the layer knows these). For inference: use it under `torch.no_grad`.

    Args:
        num_layers: the number of layers.
        capacity: the greatest number of positions.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        """Number of positions held by all layers."""
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store `key` and `value` (batch, seq, groups, head_width) of the next positions; return all of the layer's.

        `length` does not change until `advance` is called, after every layer has appended.

        Args:
            layer: the index of the layer.

        Raises:
            OnstepError: for more positions than the capacity.
        """
        end = self.length + key.shape[1]
        if end > self.capacity:
            raise OnstepError(
                f"the key/value cache has room for {self.capacity} positions, got {end}; increase its capacity."
            )
        keys = self._write(self._keys, layer, key)
        values = self._write(self._values, layer, value)
        return keys[:, :end], values[:, :end]

    def advance(self, num_positions: int) -> None:
        """Advance `length` by `num_positions`, after every layer has appended them."""
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
    """Positions, documents and earlier keys of the sequences passing through the layers; the same for all layers."""

    cos: Tensor | None = None
    """Cosines of the rotation, (seq, 1, head_width / 2) or (batch, seq, 1, head_width / 2); None for no rotation."""
    sin: Tensor | None = None
    documents: Documents | None = None
    """Which keys a query may attend to; None means all earlier ones."""
    cache: KeyValueCache | None = None
    """Cache of earlier positions, for generation."""


def learned_positions(table: nn.Embedding, start: int, length: int, position_ids: Tensor | None) -> Tensor:
    """The learned position embeddings to add to the token embeddings, (seq, hidden) or (batch, seq, hidden).

    Raises:
        ConfigError: for positions beyond the table. `position_ids` on a GPU are not checked, since that would
            synchronize with the device; CUDA reports an error instead.
    """
    if position_ids is None:
        check_positions(table, start + length)
        return local_weight(table.weight)[start : start + length]
    if position_ids.device.type == "cpu" and position_ids.numel():
        least, largest = (int(one) for one in position_ids.aminmax())
        if least < 0 or largest >= table.num_embeddings:
            raise ConfigError(
                f"position_ids range from {least} to {largest}, but learned positions only exist from 0 to "
                f"{table.num_embeddings - 1} (model.seq_length={table.num_embeddings}); use smaller ones, or train a "
                "model with rotary positions (position_embedding_type=rope)."
            )
    rows: Tensor = table(position_ids)
    return rows


def check_positions(table: nn.Embedding, end: int) -> None:
    """Refuse sequences longer than a table of learned positions.

    Raises:
        ConfigError: for a longer sequence, naming both lengths.
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
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> SequenceContext:
    """Build the context that the layers need for `tokens`.

    Args:
        dtype: that of the embedded tokens, to which angles are rounded as in `transformers`.

    Raises:
        ConfigError: for documents together with a cache, or for either beyond the length at which dynamic rotary
            angles begin to change; for boundaries without documents.
    """
    if cu_seqlens is not None and document_ids is None:
        raise ConfigError("cu_seqlens requires document_ids, which it repeats for the GPU; pass both.")
    if cache is not None and document_ids is not None:
        raise ConfigError("document_ids cannot be combined with a key/value cache; generate one document at a time.")
    documents = None if document_ids is None else documents_of(document_ids, cu_seqlens, max_seqlen)
    if rotary is None:
        return SequenceContext(documents=documents, cache=cache)
    start = 0 if cache is None else cache.length
    end = start + tokens.shape[1]
    if cache is not None and not rotary.keeps_angles(end):
        raise ConfigError(
            f"rope_scaling of type dynamic changes the angles of all positions of a sequence of {end} tokens (beyond "
            "model.seq_length), so earlier keys cannot be cached; call the model on the whole sequence without a "
            "cache."
        )
    if document_ids is not None and not rotary.keeps_angles(end):
        raise ConfigError(
            f"document_ids of a sequence of {end} tokens cannot be combined with rope_scaling of type dynamic: beyond "
            "model.seq_length the angles depend on the length, which differs between documents; call the model on one "
            "document at a time, or on shorter sequences."
        )
    cos, sin = rotary(start, end - start) if position_ids is None else rotary.at(position_ids)
    return SequenceContext(cos.to(dtype), sin.to(dtype), documents, cache)


def chosen_positions(position_ids: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """The caller's positions (batch, seq), or positions that restart at 0 in each run of equal `document_ids`; None
    means that they count from the first token."""
    if position_ids is not None or document_ids is None:
        return position_ids
    return torch.arange(document_ids.shape[1], device=document_ids.device) - first_positions(document_ids)
