"""How the weights of a new model are drawn.

The rule, of a model with `L` layers and `std = init_method_std`:

- embeddings and projections: normal with mean 0 and standard deviation `std`;
- the projections of a layer that write into the residual stream (attention output, down of feed-forward and experts):
  `std / sqrt(2 L)`, so that the sum of the `2 L` contributions has the same spread for any depth;
- biases 0, norms 1.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3; Shoeybi et al.,
"Megatron-LM" (2019), appendix B.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from onstep.config.parts import ModelConfig

_RESIDUAL_OUTPUTS = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "experts.down_weight",
    "shared_experts.down.weight",
)


def init_weights(model: nn.Module, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Draw all parameters of `model` anew, in place.

    The numbers are drawn in float32 on the CPU and copied, so they depend neither on the device nor on the dtype of
    the parameters. Parameters on the meta device are left alone.

    Args:
        generator: a CPU generator; None draws from torch's global one.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            _init_parameter(name, parameter, config, generator)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias") and not buffer.is_meta:
            buffer.zero_()


@torch.no_grad()
def _init_parameter(name: str, parameter: Tensor, config: ModelConfig, generator: torch.Generator | None) -> None:
    if name.endswith("bias"):
        parameter.zero_()
    elif name.endswith("norm.weight"):
        parameter.fill_(1.0)
    else:
        std = config.init_method_std
        if name.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * config.num_layers)
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        parameter.copy_(drawn.normal_(0.0, std, generator=generator))
