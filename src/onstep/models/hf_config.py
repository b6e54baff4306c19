"""Model configurations to and from `transformers`' `config.json` (no `transformers` needed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onstep.config.part import nearest
from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError
from onstep.models.hf_architecture import Architecture
from onstep.models.hf_experts import QWEN3_MOE
from onstep.models.hf_gpt2 import GPT2
from onstep.models.hf_llama import LLAMA, QWEN2, QWEN3
from onstep.models.sizes import check_model_config

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


def hf_config_dict(config: ModelConfig, *, eos_id: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` with which `transformers` builds the same model.

    It becomes a Llama, a Qwen2 (biases of q, k and v), a Qwen3 (norms of queries and keys) or a GPT-2 (LayerNorm,
    learned positions, no gate, biases). The longest sequence there is `seq_length`. Where the architecture has no
    dropout of the residual stream `hidden_dropout` is left out; it matters in training only.

    Args:
        eos_id: token at which `transformers` ends a generated text; None is none.
        dtype: of the stored weights, as `transformers` writes it.

    Raises:
        ConfigError: options or sizes that no architecture takes.
    """
    check_model_config(config)
    architecture = architecture_of(config)
    shared = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.share_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": eos_id,
    }
    return shared | architecture.describe(config)


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of the model that a `config.json` describes, for example a Llama, Qwen2, Qwen3 or GPT-2.

    `seq_length` is the longest sequence there. What the file leaves out has `transformers`' default.

    Raises:
        ConfigError: another architecture, a missing size, or a feature that `Transformer` does not have.
    """
    config = architecture_named(hf_config.get("model_type")).read(hf_config)
    check_model_config(config)
    return config
