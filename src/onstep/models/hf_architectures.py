"""The architectures of `transformers` that models are converted to and from."""

from __future__ import annotations

from typing import Any

from onstep.config.part import nearest
from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError
from onstep.models.hf_architecture import Architecture
from onstep.models.hf_experts import QWEN3_MOE
from onstep.models.hf_gpt2 import GPT2
from onstep.models.hf_llama import LLAMA, QWEN2, QWEN3

ARCHITECTURES: tuple[Architecture, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT2)
"""In the order in which they are tried for a configuration."""


def architecture_of(config: ModelConfig) -> Architecture:
    """The architecture that computes what a model of `config` computes.

    Raises:
        ConfigError: there is none; names the options that the most similar one does not have.
    """
    has_experts = config.num_moe_experts is not None
    found = [(architecture.obstacles(config), architecture) for architecture in ARCHITECTURES]
    obstacles, nearest_one = min(found, key=lambda one: (len(one[0]), has_experts and one[1] is not QWEN3_MOE))
    if obstacles:
        raise ConfigError(
            f"none of transformers' architectures that Onstep converts computes this model; "
            f"{nearest_one.class_name} comes nearest, but does not take {', '.join(obstacles)}. "
            f"Keep the model in Onstep's checkpoints, or change it for a model that transformers is to open."
        )
    return nearest_one


def architecture_named(model_type: Any) -> Architecture:
    """The architecture of a `config.json`'s `model_type`.

    Raises:
        ConfigError: one that is not converted.
    """
    known = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    if model_type not in known:
        hint = nearest(model_type, list(known)) if isinstance(model_type, str) else ""
        raise ConfigError(f"config.json has model_type {model_type!r}; only {', '.join(known)} can be converted.{hint}")
    return known[model_type]
