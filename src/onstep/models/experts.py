"""The experts of a layer, and how tokens get to them and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from onstep.config.parts import ModelConfig
from onstep.models.activations import ACTIVATIONS
from onstep.models.expert_products import ExpertProduct, GroupedProduct, LoopedProduct, PaddedProduct, can_group
from onstep.models.router import Routing
from onstep.models.sizes import ffn_hidden_size


class Experts(nn.Module):
    """Feed-forward blocks of the same shape, their weights stacked: (experts, out, in), biases (experts, out).

    Each computes what `FeedForward` of the same configuration does. All weights are part of every forward pass: an
    expert that got no token has a gradient of 0, so that data parallelism meets the same parameters on every rank.
    """

    gate_weight: nn.Parameter | None
    gate_bias: nn.Parameter | None
    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self._hidden = config.hidden_size
        self._width = config.moe_ffn_hidden_size or ffn_hidden_size(config)
        self._groups = config.moe_grouped_gemm
        self._drop_policy = config.moe_token_drop_policy
        self._activation = ACTIVATIONS[config.activation_func]
        inner, outer = (num_experts, self._width, self._hidden), (num_experts, self._hidden, self._width)
        self.gate_weight = nn.Parameter(torch.empty(inner)) if config.gated_linear_unit else None
        self.up_weight = nn.Parameter(torch.empty(inner))
        self.down_weight = nn.Parameter(torch.empty(outer))
        biases = config.add_bias_linear
        self.gate_bias = nn.Parameter(torch.zeros(inner[:2])) if biases and config.gated_linear_unit else None
        self.up_bias = nn.Parameter(torch.zeros(inner[:2])) if biases else None
        self.down_bias = nn.Parameter(torch.zeros(outer[:2])) if biases else None
        self._init_weights(config)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of the chosen experts for `x` (tokens, hidden); same shape, in the dtype of the products.

        Choices beyond an expert's capacity add nothing.
        """
        dtype = _product_dtype(x)
        x = x.to(dtype)
        if routing.capacity is None:
            out = self._all(x, routing)
        else:
            out = self._up_to_capacity(x, routing, routing.capacity)
        return (out * routing.weights.unsqueeze(-1)).sum(dim=1).to(dtype)

    def _all(self, x: Tensor, routing: Routing) -> Tensor:
        """What the chosen experts give for each token, (tokens, topk, hidden)."""
        order = routing.experts.flatten().argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        out = self._compute(x[order // routing.experts.shape[1]], self._product(x, routing.load))
        return out[place].view(*routing.experts.shape, -1)

    def _up_to_capacity(self, x: Tensor, routing: Routing, capacity: int) -> Tensor:
        """The same where each expert takes `capacity` choices; 0 for those that it drops."""
        choices, topk = routing.experts.flatten(), routing.experts.shape[1]
        rank = choice_ranks(routing, self._drop_policy)
        is_kept = rank < capacity
        nowhere = self.num_experts * capacity
        slot = torch.where(is_kept, choices * capacity + rank, nowhere)
        tokens = torch.arange(choices.numel(), device=x.device) // topk
        taken = torch.full((nowhere + 1,), x.shape[0], dtype=torch.int64, device=x.device)
        taken = taken.scatter_(0, slot, torch.where(is_kept, tokens, x.shape[0]))[:nowhere]
        padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
        out = self._compute(padded[taken].view(self.num_experts, capacity, -1), PaddedProduct()).flatten(0, 1)
        out = torch.cat([out, out.new_zeros(1, out.shape[1])])
        return out[slot].view(*routing.experts.shape, -1)

    def _compute(self, x: Tensor, product: ExpertProduct) -> Tensor:
        inner = product(x, self.up_weight.to(x.dtype), _as(self.up_bias, x))
        if self.gate_weight is None:
            inner = self._activation(inner)
        else:
            inner = self._activation(product(x, self.gate_weight.to(x.dtype), _as(self.gate_bias, x))) * inner
        return product(inner, self.down_weight.to(x.dtype), _as(self.down_bias, x))

    def _product(self, x: Tensor, load: Tensor) -> ExpertProduct:
        groups = self._groups and can_group(x.device, x.dtype, self._hidden, self._width)
        return GroupedProduct(load) if groups else LoopedProduct(load)

    def _init_weights(self, config: ModelConfig) -> None:
        for weight in (self.gate_weight, self.up_weight):
            if weight is not None:
                nn.init.normal_(weight, 0.0, config.init_method_std)
        nn.init.normal_(self.down_weight, 0.0, config.init_method_std / math.sqrt(2 * config.num_layers))


def choice_ranks(routing: Routing, policy: str) -> Tensor:
    """The place of each choice, (tokens * topk,), in the queue in front of its expert, from 0.

    Args:
        policy: probs lets the choices with the largest weights go first, position those of the first tokens. Equal
            weights go by position.
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


def _product_dtype(x: Tensor) -> torch.dtype:
    """What the products are computed in: autocast's type where it is on, since it does not know the grouped one."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _as(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(x.dtype)
