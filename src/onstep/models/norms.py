"""The norms of a model."""

from __future__ import annotations

from torch import nn

from onstep.config.parts import ModelConfig


def build_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """The norm that `model.normalization` names, over the last `width` elements; None is the hidden size.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); Ba et al., "Layer Normalization" (2016).
    """
    width = config.hidden_size if width is None else width
    kind = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
    return kind(width, eps=config.layernorm_epsilon)
