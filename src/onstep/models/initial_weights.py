"""Draws the initial weights of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig

_RESIDUAL_OUTPUTS = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "experts.down_weight",
    "shared_experts.down.weight",
)


@torch.no_grad()
def init_weights(model: nn.Module, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Initialize all parameters of `model` in place, with the values of `initial_values`, and expert biases with 0.

    Parameters on the meta device are left alone, and nothing is drawn for them.

    Args:
        generator: a CPU generator; None draws from torch's global RNG.
        config: the section `model` of a configuration.
    """
    parameters = {name: one for name, one in model.named_parameters() if not one.is_meta}
    for name, values in initial_values(((name, one.shape) for name, one in parameters.items()), config, generator):
        parameters[name].copy_(values)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias") and not buffer.is_meta:
            buffer.zero_()


def initial_values(
    shapes: Iterable[tuple[str, torch.Size]], config: ModelConfig, generator: torch.Generator | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The initial values of the parameters of a `Transformer`, one after the other. With `L` layers and
    `std = init_method_std`:

    - embeddings and projections: normal with mean 0 and standard deviation `std`;
    - projections of a layer that write to the residual stream (attention output, down projection of feed-forward and
      experts): `std / sqrt(2 L)`, so that the sum of the `2 L` contributions has the same variance at any depth;
    - biases 0, norms 1.

    The numbers are drawn in float32 on the CPU, so they depend neither on the device nor on the dtype of the
    parameters.

    Args:
        shapes: the names of the parameters and their shapes, in the order of the model.
        config: the section `model` of a configuration.
        generator: a CPU generator; None draws from torch's global RNG.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3; Shoeybi et al.,
    "Megatron-LM" (2019), section 4.2.
    """
    for name, shape in shapes:
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        if name.endswith("bias"):
            yield name, values.zero_()
        elif name.endswith("norm.weight"):
            yield name, values.fill_(1.0)
        else:
            into_residual = name.endswith(_RESIDUAL_OUTPUTS)
            std = config.init_method_std / (math.sqrt(2 * config.num_layers) if into_residual else 1.0)
            yield name, values.normal_(0.0, std, generator=generator)
