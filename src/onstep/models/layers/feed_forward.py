"""Implements the feed-forward block of a layer, dense or a mixture of experts with token dispatch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, silu

from onstep.config import ModelConfig
from onstep.models.layers.autocast import product_dtype
from onstep.models.layers.expert_products import (
    Blocks,
    ExpertProduct,
    GroupedProduct,
    LoopedProduct,
    padded_product,
    way_to_multiply,
)
from onstep.models.layers.router import Router, Routing
from onstep.models.sizes import ffn_hidden_size

Activation = Callable[[Tensor], Tensor]


def squared_relu(x: Tensor) -> Tensor:
    """`max(x, 0)^2`. Source: So et al., "Primer" (2021), arXiv:2109.08668."""
    return torch.square(relu(x))


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": squared_relu,
}
"""Activation functions by the names of `model.activation_func`."""


class FeedForward(nn.Module):
    """`down(f(gate(x)) * up(x))` if `gated_linear_unit` is on, else `down(f(up(x)))`; f is `activation_func`.

    Args:
        width: size of the intermediate activations; None means `ffn_hidden_size`.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equation 6; with biases if `add_bias_linear` is on.
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
        """(batch, seq, hidden) to the same shape, each position independently."""
        if self.gate is None:
            inner = self._activation(self.up(x))
        else:
            inner = self._activation(self.gate(x)) * self.up(x)
        out: Tensor = self.down(inner)
        return out


class Experts(nn.Module):
    """Feed-forward blocks of the same shape with stacked weights (experts, out, in) and biases (experts, out).

    Each computes the same as a `FeedForward` of the same configuration. All weights take part in every forward pass: an
    expert without tokens has a zero gradient, so data parallelism sees the same parameters on every rank.
    """

    gate_weight: nn.Parameter | None
    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size or ffn_hidden_size(config)
        self._groups = config.moe_grouped_gemm
        self._drop_policy = config.moe_token_drop_policy
        self._activation = ACTIVATIONS[config.activation_func]
        inner, outer = (num_experts, width, hidden), (num_experts, hidden, width)
        self.gate_weight = nn.Parameter(torch.empty(inner)) if config.gated_linear_unit else None
        self.up_weight = nn.Parameter(torch.empty(inner))
        self.down_weight = nn.Parameter(torch.empty(outer))
        biases = config.add_bias_linear
        self.gate_bias = nn.Parameter(torch.zeros(inner[:2])) if biases and config.gated_linear_unit else None
        self.up_bias = nn.Parameter(torch.zeros(inner[:2])) if biases else None
        self.down_bias = nn.Parameter(torch.zeros(outer[:2])) if biases else None
        for weight in (self.gate_weight, self.up_weight):
            if weight is not None:
                nn.init.normal_(weight, 0.0, config.init_method_std)
        nn.init.normal_(self.down_weight, 0.0, config.init_method_std / math.sqrt(2 * config.num_layers))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of the chosen experts for `x` (tokens, hidden); same shape, in the dtype of the products.

        Choices beyond an expert's capacity contribute nothing.
        """
        # dtype of the products: autocast's if enabled, since autocast does not cover the grouped product
        dtype = product_dtype(x)
        x = x.to(dtype)
        if routing.capacity is None:
            out = self._all(x, routing)
        else:
            out = self._up_to_capacity(x, routing, routing.capacity)
        return (out * routing.weights.unsqueeze(-1)).sum(dim=1).to(dtype)

    def _all(self, x: Tensor, routing: Routing) -> Tensor:
        """The outputs of the chosen experts for each token, (tokens, topk, hidden)."""
        choices, way = routing.experts.flatten(), "loop"
        if self._groups:
            _, width, hidden = self.up_weight.shape  # those of this rank, where ranks divide them
            way = way_to_multiply(x.device, x.dtype, len(choices), self.num_experts, hidden, width)
        if way == "blocks":
            blocks = Blocks(routing.load, len(choices))
            slots = blocks.first[choices] * blocks.num_block_rows + choice_ranks(routing, "position")
            return self._in_slots(x, routing, slots, (blocks.num_blocks, blocks.num_block_rows), blocks.product)
        order = choices.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        product = GroupedProduct(routing.load) if way == "grouped" else LoopedProduct(routing.load)
        out = self._compute(x[order // routing.experts.shape[1]], product)
        return out[place].view(*routing.experts.shape, -1)

    def _up_to_capacity(self, x: Tensor, routing: Routing, capacity: int) -> Tensor:
        """Like `_all`, but each expert accepts `capacity` choices; the outputs of dropped choices are 0."""
        rank = choice_ranks(routing, self._drop_policy)
        slots = torch.where(rank < capacity, routing.experts.flatten() * capacity + rank, self.num_experts * capacity)
        return self._in_slots(x, routing, slots, (self.num_experts, capacity), padded_product)

    def _in_slots(
        self, x: Tensor, routing: Routing, slots: Tensor, shape: tuple[int, int], product: ExpertProduct
    ) -> Tensor:
        """Like `_all`, with choice `i` in row `slots[i]` of an array of `shape` and hidden; none beyond its end."""
        nowhere = shape[0] * shape[1]
        tokens = torch.arange(slots.numel(), device=x.device) // routing.experts.shape[1]
        taken = torch.full((nowhere + 1,), x.shape[0], dtype=torch.int64, device=x.device)
        taken = taken.scatter_(0, slots, torch.where(slots < nowhere, tokens, x.shape[0]))[:nowhere]
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        out = self._compute(padded[taken].view(*shape, -1), product).flatten(0, 1)
        out = torch.cat([out, out.new_zeros(1, out.shape[1])])
        return out[slots].view(*routing.experts.shape, -1)

    def _compute(self, x: Tensor, product: ExpertProduct) -> Tensor:
        inner = product(x, self.up_weight.to(x.dtype), _as(self.up_bias, x))
        if self.gate_weight is None:
            inner = self._activation(inner)
        else:
            inner = self._activation(product(x, self.gate_weight.to(x.dtype), _as(self.gate_bias, x))) * inner
        return product(inner, self.down_weight.to(x.dtype), _as(self.down_bias, x))


def choice_ranks(routing: Routing, policy: str) -> Tensor:
    """The position of each choice, (tokens * topk,), in the queue of its expert, starting at 0.

    Args:
        policy: "probs" orders choices by decreasing weight, "position" by token. Ties are broken by position.
    """
    choices = routing.experts.flatten()
    if policy == "probs":
        first = routing.weights.detach().flatten().argsort(descending=True, stable=True)
        order = first[choices[first].argsort(stable=True)]
    else:
        order = choices.argsort(stable=True)
    start = routing.load.cumsum(0) - routing.load
    ranks = torch.arange(order.numel(), device=order.device) - start[choices[order]]
    return torch.empty_like(ranks).scatter_(0, order, ranks)


def _as(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)


def is_moe_layer(config: ModelConfig, layer_index: int) -> bool:
    """Whether layer `layer_index` has experts, as `moe_layer_freq` says; layers after the last one are like the last.

    Those are the layers of multi-token prediction.

    Args:
        config: the section `model` of a configuration.
    """
    if not config.num_moe_experts:
        return False
    index, frequency = min(layer_index, config.num_layers - 1), config.moe_layer_freq
    return index % frequency == 0 if isinstance(frequency, int) else bool(frequency[index])


class SharedExpert(FeedForward):
    """The expert that processes every token, with a sigmoid gate if `moe_shared_expert_gate` is on.

    Source: Dai et al., "DeepSeekMoE" (2024), section 3.2; the gate follows Qwen2-MoE.
    """

    gate_weight: nn.Parameter | None

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__(config, width)
        self.gate_weight = None
        if config.moe_shared_expert_gate:
            self.gate_weight = nn.Parameter(torch.empty(1, config.hidden_size))
            nn.init.normal_(self.gate_weight, 0.0, config.init_method_std)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        out = super().forward(x)
        return out if self.gate_weight is None else out * torch.sigmoid(linear(x, self.gate_weight))


class MixtureOfExperts(nn.Module):
    """The feed-forward block of a layer with `num_moe_experts` experts, some of which a router chooses for each token.

    Consists of `router`, `experts` and `shared_experts` (None without a shared expert).

    Args:
        config: the section `model` of a configuration.
        layer_index: the index of the layer, from 0.
    """

    shared_experts: SharedExpert | None

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        assert config.num_moe_experts is not None
        self.router = Router(config, config.num_moe_experts, layer_index)
        self.experts = Experts(config, config.num_moe_experts)
        width = config.moe_shared_expert_intermediate_size
        self.shared_experts = None if width is None else SharedExpert(config, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same shape. Collective in training if `global_aux_loss` is used.

        Args:
            x: hidden states, (batch, seq, hidden).
        """
        out: Tensor = self.experts(x.flatten(0, 1), self.router(x)).view(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out
