"""The feed-forward block of a layer without experts."""

from __future__ import annotations

from torch import Tensor, nn

from onstep.config.parts import ModelConfig
from onstep.models.activations import ACTIVATIONS
from onstep.models.sizes import ffn_hidden_size


class FeedForward(nn.Module):
    """`down(f(gate(x)) * up(x))` where `gated_linear_unit` is on, else `down(f(up(x)))`; f is `activation_func`.

    Args:
        width: elements between the matrices; None is `ffn_hidden_size`.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equation 6; biases where `add_bias_linear` is on.
    """

    gate: nn.Linear | None

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, width or ffn_hidden_size(config), config.add_bias_linear
        self._activation = ACTIVATIONS[config.activation_func]
        self.gate = nn.Linear(hidden, width, bias=bias) if config.gated_linear_unit else None
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape, each position on its own."""
        if self.gate is None:
            inner = self._activation(self.up(x))
        else:
            inner = self._activation(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out
