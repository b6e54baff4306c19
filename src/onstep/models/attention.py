"""Causal self-attention with rotary embeddings and grouped queries."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from onstep.config.parts import ModelConfig
from onstep.models.cache import KeyValueCache
from onstep.models.rotary import rotate
from onstep.models.sizes import head_width, num_query_groups


class Attention(nn.Module):
    """The attention of layer number `layer`.

    Queries, keys and values have a projection each: one fused matrix was measured and is no faster on a CPU, and
    separate ones convert to other libraries by name alone.

    Source: Ainslie et al., "GQA" (2023), for query heads that share key/value heads.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._head_width = head_width(config)
        self._is_grouped = num_query_groups(config) != config.num_attention_heads
        self._dropout = config.attention_dropout
        query_width = config.num_attention_heads * self._head_width
        key_width = num_query_groups(config) * self._head_width
        self.query = nn.Linear(config.hidden_size, query_width, bias=config.add_qkv_bias)
        self.key = nn.Linear(config.hidden_size, key_width, bias=config.add_qkv_bias)
        self.value = nn.Linear(config.hidden_size, key_width, bias=config.add_qkv_bias)
        self.output = nn.Linear(query_width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Mix `x` (batch, seq, hidden) over positions up to each one's own; same shape.

        `cos` and `sin` belong to the positions of `x`, which follow those in `cache`.
        """
        query = rotate(self._heads(self.query(x)), cos, sin)
        key = rotate(self._heads(self.key(x)), cos, sin)
        value = self._heads(self.value(x))
        if cache is not None:
            key, value = cache.append(self._layer, key, value)
        mixed = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._head_width)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of (batch, heads, queries, width) over (batch, groups, keys, width), queries at the end."""
        queries, keys = query.shape[2], key.shape[2]
        mask = None
        if 1 < queries < keys:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=queries == keys and queries > 1,
            enable_gqa=self._is_grouped,
        )
