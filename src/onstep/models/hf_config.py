"""Model configurations to and from `config.json` of `transformers`' Llama and Qwen2 (no `transformers` needed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError
from onstep.models.sizes import check_model_config, ffn_hidden_size, head_width, num_query_groups

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

_FULL_ATTENTION = ["full_attention"]

_LLAMA_WITHOUT_BIASES = {"attention_bias": False, "mlp_bias": False}

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def hf_config_dict(config: ModelConfig, *, eos_id: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` with which `transformers` builds the same model: Qwen2 with q/k/v biases, else Llama.

    `max_position_embeddings` is `seq_length`. `hidden_dropout` has no name there and is left out; it matters in
    training only.

    Args:
        eos_id: token at which `transformers` ends a generated text; None is none.
        dtype: of the stored weights, as `transformers` writes it.

    Raises:
        ConfigError: sizes that `transformers`' class does not take.
    """
    check_model_config(config)
    model_type = "qwen2" if config.add_qkv_bias else "llama"
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"transformers' {_ARCHITECTURES[model_type]} takes only a hidden_size that is a multiple of "
            f"num_attention_heads, got {config.hidden_size} and {config.num_attention_heads}; "
            "change one of them for a model that transformers is to open."
        )
    described = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": ffn_hidden_size(config),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": num_query_groups(config),
        "head_dim": head_width(config),
        "hidden_act": "silu",
        "max_position_embeddings": config.seq_length,
        "rms_norm_eps": config.layernorm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        "rope_theta": config.rotary_base,  # where transformers 4 looks
        "attention_dropout": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": config.share_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": eos_id,
    }
    return described | ({"use_sliding_window": False} if model_type == "qwen2" else _LLAMA_WITHOUT_BIASES)


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of the model that a `config.json` of Llama or Qwen2 describes.

    `seq_length` is `max_position_embeddings`. What the file leaves out has `transformers`' default.

    Raises:
        ConfigError: another architecture, a missing size, or a feature that `Transformer` does not have.
    """
    _check_supported(hf_config)
    missing = [name for name in _REQUIRED if hf_config.get(name) is None]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)}; a model needs {', '.join(_REQUIRED)}.")
    config = ModelConfig(
        num_layers=hf_config["num_hidden_layers"],
        hidden_size=hf_config["hidden_size"],
        ffn_hidden_size=hf_config["intermediate_size"],
        num_attention_heads=hf_config["num_attention_heads"],
        num_query_groups=hf_config.get("num_key_value_heads"),
        kv_channels=hf_config.get("head_dim"),
        vocab_size=hf_config["vocab_size"],
        seq_length=hf_config.get("max_position_embeddings", 2048),
        rotary_base=float(_rope_settings(hf_config).get("rope_theta", 10000.0)),
        layernorm_epsilon=hf_config.get("rms_norm_eps", 1e-6),
        add_qkv_bias=hf_config["model_type"] == "qwen2",
        share_embeddings_and_output_weights=hf_config.get("tie_word_embeddings", False),
        init_method_std=hf_config.get("initializer_range", 0.02),
        attention_dropout=hf_config.get("attention_dropout", 0.0),
    )
    check_model_config(config)
    return config


def _rope_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, over `rope_theta` and `rope_scaling` of transformers 4."""
    old = {"rope_theta": hf_config["rope_theta"]} if hf_config.get("rope_theta") is not None else {}
    return old | (hf_config.get("rope_scaling") or {}) | (hf_config.get("rope_parameters") or {})


def _check_supported(hf_config: Mapping[str, Any]) -> None:
    """Refuse by name what `Transformer` would compute differently."""
    model_type = hf_config.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise ConfigError(
            f"config.json has model_type {model_type!r}; only {' and '.join(_ARCHITECTURES)} can be converted."
        )
    found = [f"{name} = {value!r}" for name, (value, ours) in _features(hf_config).items() if value != ours]
    if found:
        raise ConfigError(
            f"config.json uses what Onstep's Transformer does not have: {', '.join(found)}; convert a model with plain "
            "rotary embeddings, full attention, SiLU, and no biases but those of Qwen2's q, k and v."
        )


def _features(hf_config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Of each setting that changes the computation: the file's value and the only one that `Transformer` has."""
    rope = _rope_settings(hf_config)
    is_llama = hf_config["model_type"] == "llama"
    partial_rotary_factor = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    return {
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "rope_parameters by layer type": (any(isinstance(value, dict) for value in rope.values()), False),
        "partial_rotary_factor": (partial_rotary_factor, 1.0),
        "hidden_act": (hf_config.get("hidden_act", "silu"), "silu"),
        "use_sliding_window": (bool(hf_config.get("use_sliding_window")), False),
        "layer_types": (sorted(set(hf_config.get("layer_types") or _FULL_ATTENTION)), _FULL_ATTENTION),
        "attention_bias": (is_llama and bool(hf_config.get("attention_bias")), False),  # Llama's is on o_proj as well
        "mlp_bias": (bool(hf_config.get("mlp_bias")), False),
        "quantization_config": (hf_config.get("quantization_config") or None, None),
    }
