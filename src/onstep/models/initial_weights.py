"""Draws the initial weights of a model."""

from __future__ import annotations

import math

import torch
from torch import nn

from onstep.config import ModelConfig

_RESIDUAL_OUTPUTS = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "experts.down_weight",
    "shared_experts.down.weight",
)


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Initialize all parameters of `model` in place. With `L` layers and `std = init_method_std`:

    - embeddings and projections: normal with mean 0 and standard deviation `std`;
    - projections of a layer that write to the residual stream (attention output, down projection of feed-forward and
      experts): `std / sqrt(2 L)`, so that the sum of the `2 L` contributions has the same variance at any depth;
    - biases 0, norms 1.

    The numbers are drawn in float32 on the CPU and copied, so they depend neither on the device nor on the dtype of
    the parameters. Parameters on the meta device are left alone.

    Args:
        generator: a CPU generator; None draws from torch's global RNG.
        config: the section `model` of a configuration.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3; Shoeybi et al.,
    "Megatron-LM" (2019), section 4.2.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            into_residual = name.endswith(_RESIDUAL_OUTPUTS)
            std = config.init_method_std / (math.sqrt(2 * config.num_layers) if into_residual else 1.0)
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias") and not buffer.is_meta:
            buffer.zero_()
