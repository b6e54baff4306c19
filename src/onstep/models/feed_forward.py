"""The feed-forward part of a layer: one block, or a mixture of experts."""

from __future__ import annotations

from torch import nn

from onstep.config.parts import ModelConfig
from onstep.models.dense_feed_forward import FeedForward
from onstep.models.mixture_of_experts import MixtureOfExperts, is_moe_layer


def build_feed_forward(config: ModelConfig, layer_index: int) -> nn.Module:
    """The feed-forward part of layer `layer_index`: (batch, seq, hidden) to the same shape."""
    return MixtureOfExperts(config, layer_index) if is_moe_layer(config, layer_index) else FeedForward(config)
