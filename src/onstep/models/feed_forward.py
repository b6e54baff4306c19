"""The feed-forward part of a layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from onstep.config.parts import ModelConfig
from onstep.models.sizes import ffn_hidden_size


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equation 6, without biases.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = ffn_hidden_size(config)
        self.gate = nn.Linear(config.hidden_size, width, bias=False)
        self.up = nn.Linear(config.hidden_size, width, bias=False)
        self.down = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape, each position on its own."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out
