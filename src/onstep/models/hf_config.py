"""Model configurations to and from `transformers`' `config.json` (no `transformers` needed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onstep.config.parts import ModelConfig
from onstep.models.hf_architectures import architecture_named, architecture_of
from onstep.models.sizes import check_model_config


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
