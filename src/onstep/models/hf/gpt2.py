"""Converts `transformers`' GPT-2, which fuses q, k and v and stores its matrices transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.models.hf.architecture import Architecture, Weights, check_complete, check_features, differing
from onstep.models.sizes import head_width, num_query_groups

_REMEDY = "as published by OpenAI: scaled, causal attention and a single dropout on the residual stream"

_OPTIONS = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False,
    "add_qkv_bias": True,
    "add_bias_linear": True,
    "qk_layernorm": False,
    "num_moe_experts": None,
    "mtp_num_layers": None,
}

_KEYS = {
    "n_embd": "hidden_size",
    "n_inner": "ffn_hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_positions": "seq_length",
    "activation_function": "activation_func",
    "layer_norm_epsilon": "layernorm_epsilon",
    "resid_pdrop": "hidden_dropout",
    "embd_pdrop": "hidden_dropout",
    "attn_pdrop": "attention_dropout",
}

_DEFAULTS = {
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}

_PARTS = ("attention.query", "attention.key", "attention.value")
_FUSED = "attention.fused"

_MODULES = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "output": "lm_head",
    "layers.{}.attention_norm": "transformer.h.{}.ln_1",
    f"layers.{{}}.{_FUSED}": "transformer.h.{}.attn.c_attn",
    "layers.{}.attention.output": "transformer.h.{}.attn.c_proj",
    "layers.{}.feed_forward_norm": "transformer.h.{}.ln_2",
    "layers.{}.feed_forward.up": "transformer.h.{}.mlp.c_fc",
    "layers.{}.feed_forward.down": "transformer.h.{}.mlp.c_proj",
}


def _obstacles(config: ModelConfig) -> list[str]:
    found = differing(config, _OPTIONS)
    if num_query_groups(config) != config.num_attention_heads:
        found.append(f"num_query_groups={config.num_query_groups}")
    if head_width(config) * config.num_attention_heads != config.hidden_size:
        found.append(f"kv_channels={config.kv_channels}")
    return found


def _read(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    features = {
        "scale_attn_weights": (hf_config["scale_attn_weights"], True),
        "scale_attn_by_inverse_layer_idx": (bool(hf_config.get("scale_attn_by_inverse_layer_idx")), False),
        "add_cross_attention": (bool(hf_config.get("add_cross_attention")), False),
        "embd_pdrop": (hf_config["embd_pdrop"], hf_config["resid_pdrop"]),
        "quantization_config": (hf_config.get("quantization_config") or None, None),
    }
    check_features(features, _REMEDY)
    check_complete(hf_config, ("vocab_size", "n_embd", "n_layer", "n_head"))
    return {"ffn_hidden_size": hf_config.get("n_inner") or 4 * hf_config["n_embd"]}


def _split(weights: Weights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    fused: dict[str, list[Tensor]] = {}
    for name, tensor in weights.items():
        part = next((part for part in _PARTS if part in name), None)
        if part is None:
            found[name] = _turned(name, tensor)
        else:  # query, key and value are in this order in the state dict
            fused.setdefault(name.replace(part, _FUSED), []).append(_turned(name, tensor))
    return found | {name: torch.cat(parts, dim=-1) for name, parts in fused.items()}


def _join(weights: Weights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if _FUSED in name:
            pieces = zip(_PARTS, tensor.chunk(3, dim=-1), strict=True)
            found |= {name.replace(_FUSED, part): _turned(name, piece) for part, piece in pieces}
        else:
            found[name] = _turned(name, tensor)
    return found


def _turned(name: str, tensor: Tensor) -> Tensor:
    """Transpose matrices in layers: GPT-2's `Conv1D` stores (in, out), `nn.Linear` (out, in)."""
    return tensor.transpose(0, 1) if tensor.dim() == 2 and name.startswith("layers.") else tensor


def _clean(weights: Weights) -> dict[str, Tensor]:
    """Drop the masks of old files, and add the prefix to files of the bare `GPT2Model`, such as OpenAI's."""
    named = {name: tensor for name, tensor in weights.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    is_bare = "wte.weight" in named
    return {f"transformer.{name}" if is_bare and name != "lm_head.weight" else name: t for name, t in named.items()}


GPT2 = Architecture(
    "gpt2",
    "GPT2LMHeadModel",
    options=_OPTIONS,
    keys=_KEYS,
    defaults=_DEFAULTS,
    modules=_MODULES,
    obstacles=_obstacles,
    describe=lambda config: {},
    read=_read,
    split=_split,
    join=_join,
    clean=_clean,
)
