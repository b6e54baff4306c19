"""Computes the size of a step, in samples and in floating-point operations."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from onstep.config import ConfigContainer, ModelConfig
from onstep.events.context import unwrap
from onstep.metrics.flops import num_floating_point_operations
from onstep.training.run import Run


def step_batch_size(config: ConfigContainer, state: Run) -> int:
    """Samples of a step over all ranks, from its number of micro-batches."""
    return (config.train.micro_batch_size or 1) * state.world.data.size * state.num_microbatches


def flops_of_samples(
    config: ConfigContainer, model: list[nn.Module], num_samples: int, seq_length: int | None = None
) -> float:
    """Model FLOPs of training on `num_samples` sequences; 0 if no configuration describes the model."""
    shape = describing_config(config, model)
    if shape is None or shape.vocab_size is None:
        return 0.0
    described = replace(config, model=shape)  # including its LoRA
    return num_floating_point_operations(described, num_samples, seq_length=seq_length or config.model.seq_length)


def describing_config(config: ConfigContainer, model: list[nn.Module]) -> ModelConfig | None:
    """The configuration with the sizes of the model; None without one.

    The built-in transformer carries its own; without a model it is the run's. A user's module has none: the run's
    configuration does not describe it.
    """
    if not model:
        return config.model
    own: ModelConfig | None = getattr(unwrap(model[0]), "config", None)
    return own if hasattr(own, "num_attention_heads") and hasattr(own, "kv_channels") else None


def model_options(config: ConfigContainer, model: list[nn.Module]) -> ModelConfig:
    """The configuration that the model was built with: the one it carries, else the run's."""
    own = describing_config(config, model)
    return config.model if own is None else own
