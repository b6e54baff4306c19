"""A layer of the transformer, and kinds of layers by class name, as conversions of checkpoints see them."""

from __future__ import annotations

from torch import Tensor, nn

from onstep.config.parts import ModelConfig
from onstep.models.attention import Attention
from onstep.models.context import SequenceContext
from onstep.models.experts import MixtureOfExperts, is_moe_layer
from onstep.models.feed_forward import FeedForward
from onstep.models.norms import build_norm


def build_feed_forward(config: ModelConfig, layer_index: int) -> nn.Module:
    """The feed-forward part of layer `layer_index`: (batch, seq, hidden) to the same shape."""
    return MixtureOfExperts(config, layer_index) if is_moe_layer(config, layer_index) else FeedForward(config)


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


REPLICATED = "replicated"
"""Every rank holds the whole layer, and other libraries' language models have no name for it."""

_KINDS: dict[str, str] = {}


def register_layer_type(class_name: str, kind: str) -> None:
    """Make the kind of a class known; doing so again changes nothing."""
    _KINDS[class_name] = kind


def layer_type(module: nn.Module) -> str | None:
    """The kind of a layer; None where its class is not registered."""
    return _KINDS.get(type(module).__name__)


def replicated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` that are registered as replicated, by name."""
    return {name: module for name, module in model.named_modules() if layer_type(module) == REPLICATED}
