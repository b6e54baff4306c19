"""Implements attention within the documents of packed sequences, with memory linear in the length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from onstep.models.layers.query_blocks import attend_in_blocks, seen_by

_SHORT, _SHORT_WITH_DROPOUT, _SHORT_COMPILED = 128, 256, 1024
"""Lengths up to which all pairs of positions are masked on a CPU, where that is faster and small: of a
sequence, or of several short documents; with dropout; compiled."""


@dataclass(frozen=True)
class Piece:
    """Consecutive whole documents of a flattened batch."""

    length: int
    mask: Tensor | None
    """(length, length), bool; None for a single document."""


@dataclass(frozen=True)
class Documents:
    """The documents of packed sequences; each is a run of equal `document_ids`."""

    first: Tensor
    """(batch, seq), int64: the position of the first token of each token's document."""
    cu_seqlens: Tensor | None
    """(documents + 1,), int32: where each begins in the flattened batch, and the end of the last one."""
    max_seqlen: int
    """At least the length of the longest document."""
    mask: Tensor | None = None
    """(batch, 1, seq, seq), bool, True where a query may attend to a key: for short sequences on a CPU."""
    pieces: list[Piece] | None = None
    """The flattened batch in pieces: for longer ones there."""

    def masks_pairs(self, has_dropout: bool) -> Tensor | None:
        """The mask, where one is used."""
        if self.mask is None and has_dropout and self.first.device.type == "cpu":
            length = self.first.shape[1]
            return seen_by(self.first, 0, length).unsqueeze(1) if length <= _SHORT_WITH_DROPOUT else None
        return self.mask


def documents_of(document_ids: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Documents:
    """The documents that `document_ids` (batch, seq) distinguish. Never waits for a device.

    Args:
        cu_seqlens: the same boundaries as cumulative lengths, with which a GPU needs no mask.
        max_seqlen: at least the length of the longest document; None means the length of a sequence.
    """
    first, length = first_positions(document_ids), document_ids.shape[1]
    max_seqlen = length if max_seqlen is None else max_seqlen
    if document_ids.device.type != "cpu":
        return Documents(first, cu_seqlens, max_seqlen)
    is_compiled = torch.compiler.is_compiling()
    if length <= (_SHORT_COMPILED if is_compiled else _SHORT):
        return Documents(first, cu_seqlens, max_seqlen, mask=seen_by(first, 0, length).unsqueeze(1))
    return Documents(first, cu_seqlens, max_seqlen, pieces=None if is_compiled else _pieces_of(first))


def first_positions(document_ids: Tensor) -> Tensor:
    """(batch, seq), int64: the position at which the run of equal ids of each token begins."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand(document_ids.shape)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(starts, index, 0).cummax(dim=1).values


def attend_within(documents: Documents, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """Causal attention of each document to itself, (batch, seq, heads, width).

    Args:
        query: (batch, seq, heads, width).
        key: (batch, seq, groups, width), as is `value`; heads are a multiple of groups.
        dropout_p: probability at which an attention weight is dropped.
    """
    if documents.cu_seqlens is not None and not dropout_p and has_kernel(query):
        from onstep.models.layers.varlen import attend_by_boundaries

        return attend_by_boundaries(query, key, value, documents.cu_seqlens, documents.max_seqlen)
    mask = documents.masks_pairs(has_dropout=dropout_p > 0)
    if mask is not None:
        return _masked(mask, query, key, value, dropout_p)
    # a layer compiled by itself would be compiled again for each division into pieces
    if not torch.compiler.is_compiling() and documents.pieces is not None and not dropout_p:
        return _in_pieces(documents.pieces, query, key, value)
    return attend_in_blocks(query, key, value, documents.first, dropout_p)


def has_kernel(query: Tensor) -> bool:
    """Whether torch has a kernel for documents of different lengths on this device, in this dtype and width."""
    if query.device.type != "cuda":
        return False
    from onstep.models.layers.varlen import runs_varlen  # lasts a second

    return runs_varlen(query)


def _masked(mask: Tensor, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    is_grouped = query.shape[1] != key.shape[1]
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout_p, enable_gqa=is_grouped
    )
    return attended.transpose(1, 2)


def _in_pieces(pieces: list[Piece], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    is_grouped, lengths = query.shape[2] != key.shape[2], [piece.length for piece in pieces]
    flat = (x.flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    parts = (torch.split(x, lengths, dim=2) for x in flat)
    attended = [
        scaled_dot_product_attention(q, k, v, piece.mask, is_causal=piece.mask is None, enable_gqa=is_grouped)
        for piece, q, k, v in zip(pieces, *parts, strict=True)
    ]
    return torch.cat(attended, dim=2)[0].transpose(0, 1).view_as(query)


def _pieces_of(first: Tensor) -> list[Piece]:
    """The flattened batch as pieces of one document, or of several that have at most `_SHORT` positions together."""
    batch, length = first.shape
    begins = (first + torch.arange(batch).unsqueeze(1) * length).flatten()
    bounds = [*begins[begins.diff(prepend=begins[:1] - 1) > 0].tolist(), batch * length]
    pieces, start = [], 0
    for number, end in enumerate(bounds[1:], start=1):
        if number + 1 < len(bounds) and bounds[number + 1] - start <= _SHORT:
            continue
        is_single = start == bounds[number - 1]
        mask = None if is_single else seen_by(begins[None, start:end] - start, 0, end - start)[0]
        pieces.append(Piece(end - start, mask))
        start = end
    return pieces
