"""Converts `transformers`' Llama, Qwen2, Qwen3 and Qwen3-MoE: one layout with different biases, norms and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models.hf.architecture import Architecture, Weights, check_complete, check_features, differing
from onstep.models.hf.values import MAX_EXPERTS, check_types
from onstep.models.layers.feed_forward import is_moe_layer
from onstep.models.layers.rotary import scaling_type
from onstep.models.sizes import ffn_hidden_size

_NOT_OURS = ("rope_theta", "type", "partial_rotary_factor")
_NEEDS_ORIGINAL = ("llama3", "yarn")
_KNOWN = ("default", "linear", "dynamic", *_NEEDS_ORIGINAL)


def _rope_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, merged over `rope_theta` and `rope_scaling` of transformers 4."""
    old = {"rope_theta": hf_config["rope_theta"]} if hf_config.get("rope_theta") is not None else {}
    return old | (hf_config.get("rope_scaling") or {}) | (hf_config.get("rope_parameters") or {})


def _our_scaling(hf_config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """`model.rope_scaling` for a file with the settings `rope`; None for plain positions.

    For Llama 3 and YaRN, an original length left to `max_position_embeddings` is made explicit, so that a different
    `seq_length` does not change the model.
    """
    kind = scaling_type(rope)
    if kind == "default":
        return None
    known = {name: value for name, value in rope.items() if name not in _NOT_OURS and value is not None}
    scaling = {"rope_type": kind} | known
    if kind in _NEEDS_ORIGINAL:
        original = hf_config.get("original_max_position_embeddings") or hf_config["max_position_embeddings"]
        scaling.setdefault("original_max_position_embeddings", original)
    else:
        scaling.pop("original_max_position_embeddings", None)  # transformers ignores it too
    return scaling


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

_FULL_ATTENTION = ["full_attention"]

_REMEDY = (
    "with full attention, a single kind of rotary positions (plain, linear, dynamic, yarn, llama3), and biases on only "
    "q, k and v (Qwen2), on all matrices (Llama) or on none"
)

_LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "gated_linear_unit": True,
    "qk_layernorm": False,
    "num_moe_experts": None,
    "mtp_num_layers": None,
}
_QWEN2 = _LLAMA | {"add_qkv_bias": True, "add_bias_linear": False}
_QWEN3 = _LLAMA | {"qk_layernorm": True, "add_qkv_bias": False, "add_bias_linear": False}
_QWEN3_MOE = _QWEN3 | {
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
}

_KEYS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "hidden_act": "activation_func",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
}

_LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
}
"""By default, there is one key/value head per query head."""
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_MOE_DEFAULTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
"""Defaults of keys that may also be null."""

_MODULES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "output": "lm_head",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.attention.query": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.key": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.value": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.attention.output": "model.layers.{}.self_attn.o_proj",
    "layers.{}.feed_forward_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.feed_forward.gate": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.up": "model.layers.{}.mlp.up_proj",
    "layers.{}.feed_forward.down": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.router": "model.layers.{}.mlp.gate",
    "layers.{}.feed_forward.experts.{}.gate": "model.layers.{}.mlp.experts.{}.gate_proj",
    "layers.{}.feed_forward.experts.{}.up": "model.layers.{}.mlp.experts.{}.up_proj",
    "layers.{}.feed_forward.experts.{}.down": "model.layers.{}.mlp.experts.{}.down_proj",
}


def _describe(config: ModelConfig) -> dict[str, Any]:
    scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
    if scaling is not None:
        scaling = {"rope_type": scaling_type(scaling)} | {k: v for k, v in scaling.items() if k != "type"}
    described = {
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": config.rotary_base},
        "rope_theta": config.rotary_base,  # read by transformers 4, like rope_scaling
    }
    described |= {} if scaling is None else {"rope_scaling": scaling}
    return described | {"attention_dropout": config.attention_dropout}


def _read(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    rope = _rope_settings(hf_config)
    check_types(rope, ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"))
    kind = scaling_type(rope)
    share = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    features = {
        "rope_type": (kind, kind if kind in _KNOWN else "default"),
        "rope_parameters by layer type": (any(isinstance(value, dict) for value in rope.values()), False),
        "partial_rotary_factor": (1.0 if share is None else share, 1.0),
        "use_sliding_window": (bool(hf_config.get("use_sliding_window")), False),
        "layer_types": (sorted(set(hf_config.get("layer_types") or _FULL_ATTENTION)), _FULL_ATTENTION),
        "quantization_config": (hf_config.get("quantization_config") or None, None),
    }
    check_features(features, _REMEDY)
    check_complete(hf_config, _REQUIRED)
    return {
        "rotary_base": float(rope.get("rope_theta") or 10000.0),
        "rope_scaling": _our_scaling(hf_config, rope),
        "attention_dropout": hf_config["attention_dropout"],
    }


def _uneven_heads(config: ModelConfig) -> list[str]:
    if config.hidden_size % config.num_attention_heads == 0:
        return []
    return [f"hidden_size={config.hidden_size}, not a multiple of num_attention_heads={config.num_attention_heads}"]


def _read_llama(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    attention, feed_forward = bool(hf_config.get("attention_bias")), bool(hf_config.get("mlp_bias"))
    if attention != feed_forward:
        check_features({"attention_bias": (attention, False), "mlp_bias": (feed_forward, False)}, _REMEDY)
    return _read(hf_config) | {"add_qkv_bias": attention, "add_bias_linear": attention}


def _describe_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _describe(config) | {"use_sliding_window": False, "attention_bias": False}


def _read_qwen3(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    check_features({"attention_bias": (bool(hf_config.get("attention_bias")), False)}, _REMEDY)
    return _read(hf_config) | {"kv_channels": hf_config.get("head_dim") or 128}  # whatever the hidden size


def _describe_moe(config: ModelConfig) -> dict[str, Any]:
    return _describe_qwen3(config) | {
        "num_experts": config.num_moe_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size or ffn_hidden_size(config),
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index in range(config.num_layers) if not is_moe_layer(config, index)],
    }


def _read_moe(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a Qwen3-MoE.

    Coefficients of auxiliary losses are not converted: `transformers` applies them to a different loss. Without
    experts, or without layers that have them, the result is a dense model, as in `transformers`.
    """
    check_features(
        {"attention_bias": (bool(hf_config.get("attention_bias")), False)}, "without biases, with a softmax router"
    )
    sizes = {name: _first(hf_config.get(name), fallback) for name, fallback in _MOE_DEFAULTS.items()}
    experts = _first(hf_config.get("num_local_experts"), sizes["num_experts"])  # transformers 5 writes the first
    pattern = _pattern(hf_config, sizes["decoder_sparse_step"])
    options = _read(hf_config)
    if experts and any(pattern):
        options |= {
            "num_moe_experts": experts,
            "moe_router_topk": sizes["num_experts_per_tok"],
            "moe_ffn_hidden_size": sizes["moe_intermediate_size"],
            "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
            "moe_layer_freq": 1 if all(pattern) else pattern,
        }
    return options


def _pattern(hf_config: Mapping[str, Any], step: int) -> list[int]:
    """For each layer, 1 if it has experts, else 0."""
    if step < 1:
        raise ConfigError(
            f"config.json has decoder_sparse_step={step}, which must be >= 1; use 1 for experts in every layer."
        )
    check_complete(hf_config, _REQUIRED)
    dense = set(hf_config.get("mlp_only_layers") or ())
    layers = range(hf_config["num_hidden_layers"])
    return [int(index not in dense and (index + 1) % step == 0) for index in layers]


def _first(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value


def _split(weights: Weights) -> dict[str, Tensor]:
    """Split stacked matrices by expert: `experts.up_weight` becomes `experts.0.up.weight`, ..."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix, experts, matrix = name.rpartition(".experts.")
        found |= _each(prefix + experts, matrix.removesuffix("_weight"), tensor) if experts else {name: tensor}
    return found


def _join(weights: Weights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        prefix, experts, rest = name.rpartition(".experts.")
        if experts:
            index, matrix, _ = rest.split(".")
            stacks.setdefault(f"{prefix}{experts}{matrix}_weight", {})[int(index)] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([by[i] for i in sorted(by)]) for name, by in stacks.items()}


def _clean(weights: Weights) -> dict[str, Tensor]:
    """Drop the frequencies of old files, and split experts, which `transformers` 5 stacks in its modules."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix, experts, matrix = name.rpartition(".mlp.experts.")
        is_stack = tensor.dim() == 3 and len(tensor) <= MAX_EXPERTS
        if matrix == "gate_up_proj" and is_stack:
            gate, up = tensor.chunk(2, dim=1)
            found |= _each(prefix + experts, "gate_proj", gate) | _each(prefix + experts, "up_proj", up)
        elif matrix == "down_proj" and is_stack:
            found |= _each(prefix + experts, matrix, tensor)
        elif not name.endswith("rotary_emb.inv_freq"):
            found[name] = tensor
    return found


def _each(prefix: str, matrix: str, stacked: Tensor) -> dict[str, Tensor]:
    return {f"{prefix}{index}.{matrix}.weight": one for index, one in enumerate(stacked.unbind())}


LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    options=_LLAMA,
    keys=_KEYS,
    defaults=_LLAMA_DEFAULTS,
    modules=_MODULES,
    obstacles=lambda config: (
        differing(config, _LLAMA | {"add_qkv_bias": config.add_bias_linear}) + _uneven_heads(config)
    ),
    describe=lambda config: (
        _describe(config) | {"attention_bias": config.add_bias_linear, "mlp_bias": config.add_bias_linear}
    ),
    read=_read_llama,
    split=_split,
    join=_join,
    clean=_clean,
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    options=_QWEN2,
    defaults=_QWEN_DEFAULTS,
    obstacles=lambda config: differing(config, _QWEN2) + _uneven_heads(config),
    describe=lambda config: _describe(config) | {"use_sliding_window": False},
    read=_read,
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    options=_QWEN3,
    obstacles=lambda config: differing(config, _QWEN3),
    describe=_describe_qwen3,
    read=_read_qwen3,
)
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    options=_QWEN3_MOE,
    defaults=_QWEN_DEFAULTS | {"num_key_value_heads": 4},
    obstacles=lambda config: differing(config, _QWEN3_MOE | {"num_moe_experts": config.num_moe_experts or "a number"}),
    describe=_describe_moe,
    read=_read_moe,
)
