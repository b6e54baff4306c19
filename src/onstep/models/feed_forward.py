"""The feed-forward block of a layer without experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from onstep.config.parts import ModelConfig
from onstep.models.sizes import ffn_hidden_size

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0)^2`.

    Source: So et al., "Primer" (2021), section 4.
    """
    return torch.square(relu(x))


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": squared_relu,
}
"""By the names of `model.activation_func`."""


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
