"""A layer of the transformer."""

from __future__ import annotations

from torch import Tensor, nn

from onstep.config.parts import ModelConfig
from onstep.models.attention import Attention
from onstep.models.context import SequenceContext
from onstep.models.feed_forward import build_feed_forward
from onstep.models.norms import build_norm


class Layer(nn.Module):
    """Attention, then feed-forward, each on the normed residual stream and added to it."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, index)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = build_feed_forward(config, index)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), context))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out
