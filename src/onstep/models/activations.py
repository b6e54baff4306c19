"""The functions between the matrices of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

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
