"""GPT-2 of `transformers`: fused q, k and v, and matrices that lie the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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
from onstep.models.sizes import ffn_hidden_size, head_width, num_query_groups

_REMEDY = "as OpenAI published it: scaled, causal attention and one dropout of the residual stream"

_REQUIRED = ("vocab_size", "n_embd", "n_layer", "n_head")

_THEIR_ACTIVATIONS = {ours: theirs for theirs, ours in HF_ACTIVATIONS.items()} | {"gelu_tanh": "gelu_new"}

_OUTSIDE_LAYERS = {
    "embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}

_IN_LAYER = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_FUSED = "attn.c_attn"
_PARTS = ("attention.query", "attention.key", "attention.value")


def _obstacles(config: ModelConfig) -> list[str]:
    found = differing(
        config,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        gated_linear_unit=False,
        add_qkv_bias=True,
        add_bias_linear=True,
        qk_layernorm=False,
        num_moe_experts=None,
        mtp_num_layers=None,
    )
    if num_query_groups(config) != config.num_attention_heads:
        found.append(f"num_query_groups={config.num_query_groups}")
    if head_width(config) * config.num_attention_heads != config.hidden_size:
        found.append(f"kv_channels={config.kv_channels}")
    return found


def _describe(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_inner": ffn_hidden_size(config),
        "n_layer": config.num_layers,
        "n_head": config.num_attention_heads,
        "n_positions": config.seq_length,
        "activation_function": _THEIR_ACTIVATIONS[config.activation_func],
        "layer_norm_epsilon": config.layernorm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
    }


def _read(hf_config: Mapping[str, Any]) -> ModelConfig:
    check_features(_features(hf_config), _REMEDY)
    check_complete(hf_config, _REQUIRED)
    hidden = hf_config["n_embd"]
    return ModelConfig(
        num_layers=hf_config["n_layer"],
        hidden_size=hidden,
        ffn_hidden_size=hf_config.get("n_inner") or 4 * hidden,
        num_attention_heads=hf_config["n_head"],
        vocab_size=hf_config["vocab_size"],
        seq_length=hf_config.get("n_positions", 1024),
        layernorm_epsilon=hf_config.get("layer_norm_epsilon", 1e-5),
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        gated_linear_unit=False,
        activation_func=our_activation(hf_config.get("activation_function", "gelu_new")),
        add_qkv_bias=True,
        add_bias_linear=True,
        share_embeddings_and_output_weights=hf_config.get("tie_word_embeddings", True),
        init_method_std=hf_config.get("initializer_range", 0.02),
        hidden_dropout=hf_config.get("resid_pdrop", 0.1),
        attention_dropout=hf_config.get("attn_pdrop", 0.1),
    )


def _features(hf_config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    residual = hf_config.get("resid_pdrop", 0.1)
    return {
        "scale_attn_weights": (hf_config.get("scale_attn_weights", True), True),
        "scale_attn_by_inverse_layer_idx": (bool(hf_config.get("scale_attn_by_inverse_layer_idx")), False),
        "add_cross_attention": (bool(hf_config.get("add_cross_attention")), False),
        "embd_pdrop": (hf_config.get("embd_pdrop", 0.1), residual),
        "quantization_config": (hf_config.get("quantization_config") or None, None),
    }


def _to_hf(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    converted: dict[str, Tensor] = {}
    fused: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        if name in _OUTSIDE_LAYERS:
            converted[_OUTSIDE_LAYERS[name]] = tensor
            continue
        _, index, rest = name.split(".", 2)
        module, kind = rest.rsplit(".", 1)
        turned = _turned(module, tensor)
        if module in _PARTS:
            fused.setdefault(f"transformer.h.{index}.{_FUSED}.{kind}", []).append(turned)
        else:
            converted[f"transformer.h.{index}.{_IN_LAYER[module]}.{kind}"] = turned
    # query, key and value come in this order in the state dict
    return converted | {name: torch.cat(parts, dim=-1) for name, parts in fused.items()}


def _from_hf(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    outside = {theirs: ours for ours, theirs in _OUTSIDE_LAYERS.items()}
    modules = {theirs: ours for ours, theirs in _IN_LAYER.items()}
    converted: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in outside:
            converted[outside[name]] = tensor
            continue
        _, _, index, rest = name.split(".", 3)
        module, kind = rest.rsplit(".", 1)
        if module == _FUSED:
            for part, piece in zip(_PARTS, tensor.chunk(3, dim=-1), strict=True):
                converted[f"layers.{index}.{part}.{kind}"] = _turned(part, piece)
        else:
            converted[f"layers.{index}.{modules[module]}.{kind}"] = _turned(modules[module], tensor)
    return converted


def _turned(module: str, tensor: Tensor) -> Tensor:
    """Its `Conv1D` matrices are (in, out), those of `nn.Linear` (out, in); norms and biases stay."""
    return tensor.transpose(0, 1) if tensor.dim() == 2 and not module.endswith("norm") else tensor


def _clean(weights: Weights) -> dict[str, Tensor]:
    """Without the masks of old files; files of the bare `GPT2Model`, as OpenAI's are, get the prefix."""
    named = {name: tensor for name, tensor in weights.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    is_bare = "wte.weight" in named
    return {f"transformer.{name}" if is_bare and name != "lm_head.weight" else name: t for name, t in named.items()}


GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    _obstacles,
    _describe,
    _read,
    to_hf=_to_hf,
    from_hf=_from_hf,
    clean=_clean,
    embedding=_OUTSIDE_LAYERS["embedding.weight"],
    output=_OUTSIDE_LAYERS["output.weight"],
)
