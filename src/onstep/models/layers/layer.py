"""Implements a transformer layer: norms, attention (grouped queries, rotary embeddings) and the feed-forward block."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from onstep.config import ModelConfig
from onstep.models.layers.documents import attend_within
from onstep.models.layers.feed_forward import FeedForward, MixtureOfExperts, is_moe_layer
from onstep.models.layers.head_share import HeadShare
from onstep.models.layers.query_blocks import seen_by
from onstep.models.layers.rotary import rotate
from onstep.models.layers.sequence_context import SequenceContext
from onstep.models.sizes import head_width, num_query_groups

_BLOCK_ELEMENTS = 2**24
"""Maximum number of scores held in memory at once."""


def build_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """The norm selected by `model.normalization`, over the last `width` elements; None means the hidden size.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); Ba et al., "Layer Normalization" (2016).
    """
    width = config.hidden_size if width is None else width
    kind = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
    return kind(width, eps=config.layernorm_epsilon)


@torch.no_grad()
def largest_logit(
    query: Tensor, key: Tensor, first: Tensor | None = None, *, block_elements: int = _BLOCK_ELEMENTS
) -> Tensor:
    """The largest `query . key / sqrt(width)` over all pairs of a query and a key that it attends to.

    Scores are computed for a block of queries at a time, in the dtype of the computation and without a gradient.

    Args:
        query: (batch, heads, seq, width).
        key: (batch, groups, seq, width); heads are a multiple of groups.
        first: (batch, seq), the first position that each query attends to; None means 0.
        block_elements: maximum number of scores held at once (but at least those of one query position).

    Returns:
        (), float32 (float64 for float64 queries), on the device.
    """
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    grouped = query.view(batch, groups, heads // groups, length, width)
    rows = max(1, block_elements // (batch * heads * length))
    largest = []
    for start in range(0, length, rows):
        part = grouped[..., start : start + rows, :]
        end = start + part.shape[-2]
        scores = part @ key[:, :, None, :end].transpose(-2, -1)
        if first is None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(start)
        else:
            seen = seen_by(first, start, end)[:, None, None]
        largest.append(scores.masked_fill_(~seen, -math.inf).amax())
    found = torch.stack(largest).amax()
    return found.to(torch.promote_types(found.dtype, torch.float32)) / math.sqrt(width)


class Attention(nn.Module):
    """The attention of layer number `layer`.

    Queries, keys and values have separate projections: a fused matrix measured no faster on a CPU, and separate ones
    convert to other libraries by renaming alone.

    Source: Ainslie et al., "GQA" (2023), for query heads that share key/value heads.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._head_width = head_width(config)
        self._is_grouped = num_query_groups(config) != config.num_attention_heads
        self.num_heads, self.dropout = config.num_attention_heads, config.attention_dropout
        self._watches_logits = config.log_max_attention_logit
        self.shares: HeadShare | None = None
        """Which heads this rank has, where ranks divide them; None for all."""
        self.largest_logit: Tensor | None = None
        """From the last forward pass without a cache, (), float32; None if `log_max_attention_logit` is off."""
        query_width = config.num_attention_heads * self._head_width
        key_width = num_query_groups(config) * self._head_width
        self.query = nn.Linear(config.hidden_size, query_width, bias=config.add_qkv_bias)
        self.key = nn.Linear(config.hidden_size, key_width, bias=config.add_qkv_bias)
        self.value = nn.Linear(config.hidden_size, key_width, bias=config.add_qkv_bias)
        self.query_norm = build_norm(config, self._head_width) if config.qk_layernorm else None
        self.key_norm = build_norm(config, self._head_width) if config.qk_layernorm else None
        self.output = nn.Linear(query_width, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """Mix each position of `x` (batch, seq, hidden) with the earlier ones; same shape."""
        heads = (*x.shape[:-1], -1, self._head_width)
        query, key, value = self.query(x).view(heads), self.key(x).view(heads), self.value(x).view(heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query).type_as(query), self.key_norm(key).type_as(key)
        if context.cos is not None and context.sin is not None:
            query, key = rotate(query, context.cos, context.sin), rotate(key, context.cos, context.sin)
        if context.cache is not None:
            key, value = context.cache.append(self._layer, key, value)
        documents = context.documents
        if self._watches_logits and context.cache is None:
            first = None if documents is None else documents.first
            self.largest_logit = largest_logit(query.detach().transpose(1, 2), key.detach().transpose(1, 2), first)
        dropout_p = self.dropout if self.training else 0.0
        shares = self.shares if dropout_p else None
        if documents is not None:
            with nullcontext() if shares is None else shares.own_stream(query.device):
                attended = attend_within(documents, query, key, value, dropout_p)
            within: Tensor = self.output(attended.flatten(2))
            return within
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        queries, keys, mask = query.shape[2], key.shape[2], None
        if 1 < queries < keys:  # the queries are the last positions
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        attend = scaled_dot_product_attention if shares is None else shares.attend
        attended = attend(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=mask is None and queries > 1,
            enable_gqa=self._is_grouped,
        )
        projected: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return projected


class Layer(nn.Module):
    """Attention followed by feed-forward, each applied to the normed residual stream and added to it."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, index)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = MixtureOfExperts(config, index) if is_moe_layer(config, index) else FeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), context))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out
