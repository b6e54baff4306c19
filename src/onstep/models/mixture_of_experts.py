"""A mixture of experts in the place of a layer's feed-forward block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from onstep.config.parts import ModelConfig
from onstep.models.dense_feed_forward import FeedForward
from onstep.models.experts import Experts
from onstep.models.router import Router


def is_moe_layer(config: ModelConfig, layer_index: int) -> bool:
    """Whether layer `layer_index` has experts, as `moe_layer_freq` says; layers behind the last one are as that is.

    Those are the layers of multi-token prediction.
    """
    if not config.num_moe_experts:
        return False
    index, frequency = min(layer_index, config.num_layers - 1), config.moe_layer_freq
    return index % frequency == 0 if isinstance(frequency, int) else bool(frequency[index])


class SharedExpert(FeedForward):
    """The expert that every token goes to, behind a sigmoid gate where `moe_shared_expert_gate` is on.

    Source: Dai et al., "DeepSeekMoE" (2024), section 3.2; the gate is Qwen2-MoE's.
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
    """The feed-forward part of a layer with `num_moe_experts` experts, of which a router chooses some for each token.

    `router`, `experts` and `shared_experts` (None without a shared expert) are its parts.
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
        """(batch, seq, hidden) to the same shape. Collective in training where `global_aux_loss` is used."""
        out: Tensor = self.experts(x.flatten(0, 1), self.router(x)).view(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out
