"""The size of a step, in samples and in floating-point operations."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from onstep.config import ConfigContainer
from onstep.config.parts import ModelConfig
from onstep.events.context import unwrap
from onstep.metrics.flops import num_floating_point_operations
from onstep.training.run import Run


def step_batch_size(config: ConfigContainer, state: Run) -> int:
    """Samples of a step over all ranks, from the number of micro-batches that it has."""
    return (config.train.micro_batch_size or 1) * state.world.size * state.num_microbatches


def flops_of_samples(
    config: ConfigContainer, model: list[nn.Module], num_samples: int, seq_length: int | None = None
) -> float:
    """Model FLOPs of training on `num_samples` sequences; 0 where no configuration says what the model is like."""
    shape = describing_config(config, model)
    if shape is None or shape.vocab_size is None:
        return 0.0
    described = replace(config, model=shape)  # with its LoRA
    return num_floating_point_operations(described, num_samples, seq_length=seq_length or config.model.seq_length)


def describing_config(config: ConfigContainer, model: list[nn.Module]) -> ModelConfig | None:
    """The configuration with the sizes of the model; None where there is none.

    The built-in transformer carries its own; without a model it is the run's. A module of the user has none: the run's
    configuration is not about it.
    """
    if not model:
        return config.model
    own: ModelConfig | None = getattr(unwrap(model[0]), "config", None)
    return own if hasattr(own, "num_attention_heads") and hasattr(own, "kv_channels") else None


def model_options(config: ConfigContainer, model: list[nn.Module]) -> ModelConfig:
    """The configuration that the model was built with: its own where it carries one, else the run's."""
    own = describing_config(config, model)
    return config.model if own is None else own
