"""Llama, Qwen2 and Qwen3 of `transformers`: one layout with different biases and norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from onstep.config.parts import ModelConfig
from onstep.models.hf_architecture import (
    HF_ACTIVATIONS,
    Architecture,
    Weights,
    check_complete,
    check_features,
    differing,
    our_activation,
)
from onstep.models.rotary import scaling_type
from onstep.models.sizes import ffn_hidden_size, head_width, num_query_groups

_NOT_OURS = ("rope_theta", "type", "partial_rotary_factor")
_NEEDS_ORIGINAL = ("llama3", "yarn")
_KNOWN = ("default", "linear", "dynamic", *_NEEDS_ORIGINAL)


def rope_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, over `rope_theta` and `rope_scaling` of transformers 4."""
    old = {"rope_theta": hf_config["rope_theta"]} if hf_config.get("rope_theta") is not None else {}
    return old | (hf_config.get("rope_scaling") or {}) | (hf_config.get("rope_parameters") or {})


def our_scaling(hf_config: Mapping[str, Any], seq_length: int) -> dict[str, Any] | None:
    """`model.rope_scaling` of a file; None where the positions are plain.

    Llama 3 and YaRN get the original length that a file leaves to its `max_position_embeddings`, so that another
    `seq_length` does not change the model.
    """
    settings = rope_settings(hf_config)
    kind = scaling_type(settings)
    if kind == "default":
        return None
    scaling = {name: value for name, value in settings.items() if name not in _NOT_OURS and value is not None}
    scaling = {"rope_type": kind} | scaling
    if kind in _NEEDS_ORIGINAL:
        original = hf_config.get("original_max_position_embeddings")
        scaling.setdefault("original_max_position_embeddings", original or seq_length)
    else:
        scaling.pop("original_max_position_embeddings", None)  # not read there either
    return scaling


def rope_features(hf_config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of the positions that `Transformer` does not have; see `check_features`."""
    settings = rope_settings(hf_config)
    kind = scaling_type(settings)
    share = settings.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    return {
        "rope_type": (kind, kind if kind in _KNOWN else "default"),
        "rope_parameters by layer type": (any(isinstance(value, dict) for value in settings.values()), False),
        "partial_rotary_factor": (1.0 if share is None else share, 1.0),
    }


def describe_rope(config: ModelConfig) -> dict[str, Any]:
    """The positions of `config` for transformers 5 and 4."""
    scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
    if scaling is not None:
        scaling = {"rope_type": scaling_type(scaling)} | {k: v for k, v in scaling.items() if k != "type"}
    described = {
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": config.rotary_base},
        "rope_theta": config.rotary_base,  # where transformers 4 looks
    }
    return described | ({} if scaling is None else {"rope_scaling": scaling})


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

_LLAMA_DEFAULTS = {"max_position_embeddings": 2048}
"""What `transformers` takes where a `config.json` says nothing; a key/value head for each query head."""

_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}

_FULL_ATTENTION = ["full_attention"]

_REMEDY = (
    "with full attention, rotary positions of one kind (plain, linear, dynamic, yarn, llama3), and biases of q, k and "
    "v alone (Qwen2), of all matrices (Llama) or of none"
)

_OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_OUR_NAMES = {theirs: ours for ours, theirs in _IN_LAYER.items()}


def hf_name(name: str) -> str:
    """`transformers`' name for the weight that `Transformer` calls `name`."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    _, index, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.layers.{index}.{_IN_LAYER[module]}.{kind}"


def our_name(name: str) -> str:
    """`Transformer`'s name for the weight that `transformers` calls `name`."""
    for ours, theirs in _OUTSIDE_LAYERS.items():
        if name == theirs:
            return ours
    _, _, index, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"layers.{index}.{_OUR_NAMES[module]}.{kind}"


def describe_llama_like(config: ModelConfig) -> dict[str, Any]:
    """What the family shares in `config.json`."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": ffn_hidden_size(config),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": num_query_groups(config),
        "head_dim": head_width(config),
        "hidden_act": next(theirs for theirs, ours in HF_ACTIVATIONS.items() if ours == config.activation_func),
        "max_position_embeddings": config.seq_length,
        "rms_norm_eps": config.layernorm_epsilon,
        **describe_rope(config),
        "attention_dropout": config.attention_dropout,
    }


def read_llama_like(hf_config: Mapping[str, Any], defaults: Mapping[str, Any], **options: Any) -> ModelConfig:
    """The configuration of a `config.json` of the family; what the file leaves out has `transformers`' default.

    Args:
        defaults: the architecture's own for what its file leaves out.
        options: fields of the `ModelConfig` beside those that the family shares.

    Raises:
        ConfigError: a missing size, or a feature that `Transformer` does not have.
    """
    check_features(_features(hf_config), _REMEDY)
    check_complete(hf_config, REQUIRED)
    hf_config = {**defaults, **hf_config}
    seq_length = hf_config["max_position_embeddings"]
    shared = {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "ffn_hidden_size": hf_config["intermediate_size"],
        "num_attention_heads": hf_config["num_attention_heads"],
        "num_query_groups": hf_config.get("num_key_value_heads"),
        "kv_channels": hf_config.get("head_dim"),
        "vocab_size": hf_config["vocab_size"],
        "seq_length": seq_length,
        "rotary_base": float(rope_settings(hf_config).get("rope_theta") or 10000.0),
        "rope_scaling": our_scaling(hf_config, seq_length),
        "layernorm_epsilon": hf_config.get("rms_norm_eps", 1e-6),
        "activation_func": our_activation(hf_config.get("hidden_act", "silu")),
        "share_embeddings_and_output_weights": hf_config.get("tie_word_embeddings", False),
        "init_method_std": hf_config.get("initializer_range", 0.02),
        "attention_dropout": hf_config.get("attention_dropout", 0.0),
    }
    return ModelConfig(**(shared | options))


def llama_like_obstacles(config: ModelConfig, **expected: Any) -> list[str]:
    """What of `config` the family does not have, with further options of the model's own."""
    family: dict[str, Any] = {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "gated_linear_unit": True,
        "qk_layernorm": False,
        "num_moe_experts": None,
        "mtp_num_layers": None,
    }
    return differing(config, **(family | expected))


def without_buffers(weights: Weights) -> dict[str, Tensor]:
    """Without the frequencies that old files hold."""
    return {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}


def _features(hf_config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return rope_features(hf_config) | {
        "use_sliding_window": (bool(hf_config.get("use_sliding_window")), False),
        "layer_types": (sorted(set(hf_config.get("layer_types") or _FULL_ATTENTION)), _FULL_ATTENTION),
        "quantization_config": (hf_config.get("quantization_config") or None, None),
    }


def _to_hf(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    return {hf_name(name): tensor for name, tensor in weights.items()}


def _from_hf(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    return {our_name(name): tensor for name, tensor in weights.items()}


def _uneven_heads(config: ModelConfig) -> list[str]:
    if config.hidden_size % config.num_attention_heads == 0:
        return []
    return [
        f"hidden_size={config.hidden_size}, which is no multiple of num_attention_heads={config.num_attention_heads}"
    ]


def _llama_obstacles(config: ModelConfig) -> list[str]:
    has_biases = config.add_bias_linear
    return llama_like_obstacles(config, add_qkv_bias=has_biases) + _uneven_heads(config)


def _describe_llama(config: ModelConfig) -> dict[str, Any]:
    has_biases = config.add_bias_linear
    return describe_llama_like(config) | {"attention_bias": has_biases, "mlp_bias": has_biases}


def _read_llama(hf_config: Mapping[str, Any]) -> ModelConfig:
    attention, feed_forward = bool(hf_config.get("attention_bias")), bool(hf_config.get("mlp_bias"))
    if attention != feed_forward:
        check_features({"attention_bias": (attention, False), "mlp_bias": (feed_forward, False)}, _REMEDY)
    return read_llama_like(hf_config, _LLAMA_DEFAULTS, add_qkv_bias=attention, add_bias_linear=attention)


def _qwen2_obstacles(config: ModelConfig) -> list[str]:
    return llama_like_obstacles(config, add_qkv_bias=True, add_bias_linear=False) + _uneven_heads(config)


def _describe_qwen2(config: ModelConfig) -> dict[str, Any]:
    return describe_llama_like(config) | {"use_sliding_window": False}


def _read_qwen2(hf_config: Mapping[str, Any]) -> ModelConfig:
    return read_llama_like(hf_config, _QWEN_DEFAULTS, add_qkv_bias=True)


def _qwen3_obstacles(config: ModelConfig) -> list[str]:
    return llama_like_obstacles(config, qk_layernorm=True, add_qkv_bias=False, add_bias_linear=False)


def _describe_qwen3(config: ModelConfig) -> dict[str, Any]:
    return describe_llama_like(config) | {"use_sliding_window": False, "attention_bias": False}


def _read_qwen3(hf_config: Mapping[str, Any]) -> ModelConfig:
    check_features({"attention_bias": (bool(hf_config.get("attention_bias")), False)}, _REMEDY)
    head_dim = hf_config.get("head_dim") or 128  # its default, whatever the hidden size
    return read_llama_like(hf_config, _QWEN_DEFAULTS, qk_layernorm=True, kv_channels=head_dim)


def _architecture(model_type: str, class_name: str, obstacles: Any, describe: Any, read: Any) -> Architecture:
    return Architecture(
        model_type,
        class_name,
        obstacles,
        describe,
        read,
        to_hf=_to_hf,
        from_hf=_from_hf,
        clean=without_buffers,
        embedding=_OUTSIDE_LAYERS["embedding.weight"],
        output=_OUTSIDE_LAYERS["output.weight"],
    )


LLAMA = _architecture("llama", "LlamaForCausalLM", _llama_obstacles, _describe_llama, _read_llama)
QWEN2 = _architecture("qwen2", "Qwen2ForCausalLM", _qwen2_obstacles, _describe_qwen2, _read_qwen2)
QWEN3 = _architecture("qwen3", "Qwen3ForCausalLM", _qwen3_obstacles, _describe_qwen3, _read_qwen3)
