"""Qwen3-MoE of `transformers`: Qwen3 with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError
from onstep.models.experts import is_moe_layer
from onstep.models.hf_architecture import Architecture, Weights, check_complete, check_features, differing
from onstep.models.hf_llama import (
    REQUIRED,
    describe_llama_like,
    hf_name,
    llama_like_obstacles,
    our_name,
    read_llama_like,
    without_buffers,
)
from onstep.models.sizes import ffn_hidden_size

_REMEDY = "without biases, with a softmax router"

_DEFAULTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
"""What `transformers` takes where a `config.json` says nothing."""

_FAMILY = {"max_position_embeddings": 32768, "num_key_value_heads": 4}
"""The same of what the Llama family shares."""

_ROUTER = ("feed_forward.router.weight", "mlp.gate.weight")

_MATRICES = {"gate_weight": "gate_proj", "up_weight": "up_proj", "down_weight": "down_proj"}
"""Our stacked matrices of experts, and the names of each expert's there."""

_OURS, _THEIRS = ".feed_forward.experts.", ".mlp.experts."


def _obstacles(config: ModelConfig) -> list[str]:
    found = llama_like_obstacles(
        config,
        qk_layernorm=True,
        add_qkv_bias=False,
        add_bias_linear=False,
        num_moe_experts=config.num_moe_experts,
        moe_router_score_function="softmax",
        moe_router_topk_scaling_factor=None,
        moe_router_enable_expert_bias=False,
        moe_shared_expert_intermediate_size=None,
    )
    return found if config.num_moe_experts else [*found, *differing(config, num_moe_experts="a number")]


def _describe(config: ModelConfig) -> dict[str, Any]:
    dense = [index for index in range(config.num_layers) if not is_moe_layer(config, index)]
    return describe_llama_like(config) | {
        "use_sliding_window": False,
        "attention_bias": False,
        "num_experts": config.num_moe_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size or ffn_hidden_size(config),
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def _read(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Coefficients of auxiliary losses are not taken over: `transformers` computes another loss with them.

    Without experts, or without a layer that has them, it is a dense model, as there.
    """
    check_features({"attention_bias": (bool(hf_config.get("attention_bias")), False)}, _REMEDY)
    sizes = {name: _first(hf_config.get(name), fallback) for name, fallback in _DEFAULTS.items()}
    experts = _first(hf_config.get("num_local_experts"), sizes["num_experts"])  # transformers 5 writes the first
    pattern = _pattern(hf_config, sizes["decoder_sparse_step"])
    options: dict[str, Any] = {}
    if experts and any(pattern):
        options = {
            "num_moe_experts": experts,
            "moe_router_topk": sizes["num_experts_per_tok"],
            "moe_ffn_hidden_size": sizes["moe_intermediate_size"],
            "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
            "moe_layer_freq": 1 if all(pattern) else pattern,
        }
    return read_llama_like(hf_config, _FAMILY, qk_layernorm=True, **options)


def _pattern(hf_config: Mapping[str, Any], step: int) -> list[int]:
    """Of each layer whether it has experts, 1 or 0."""
    if step < 1:
        raise ConfigError(
            f"config.json has decoder_sparse_step={step}, which must be >= 1; 1 is experts in each layer."
        )
    check_complete(hf_config, REQUIRED)
    dense = set(hf_config.get("mlp_only_layers") or ())
    layers = range(hf_config["num_hidden_layers"])
    return [int(index not in dense and (index + 1) % step == 0) for index in layers]


def _first(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value


def _to_hf(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if _OURS in name:
            layer, matrix = name.split(_OURS)
            prefix = f"model.{layer}{_THEIRS}"
            found |= {f"{prefix}{i}.{_MATRICES[matrix]}.weight": one for i, one in enumerate(tensor.unbind())}
        elif name.endswith(_ROUTER[0]):
            found[f"model.{name.removesuffix(_ROUTER[0])}{_ROUTER[1]}"] = tensor
        else:
            found[hf_name(name)] = tensor
    return found


def _from_hf(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    ours = {theirs: name for name, theirs in _MATRICES.items()}
    for name, tensor in weights.items():
        if _THEIRS in name:
            layer, rest = name.removeprefix("model.").split(_THEIRS)
            index, matrix, _ = rest.split(".")
            stacks.setdefault(f"{layer}{_OURS}{ours[matrix]}", {})[int(index)] = tensor
        elif name.endswith(_ROUTER[1]):
            found[name.removeprefix("model.").removesuffix(_ROUTER[1]) + _ROUTER[0]] = tensor
        else:
            found[our_name(name)] = tensor
    return found | {name: torch.stack([by[i] for i in sorted(by)]) for name, by in stacks.items()}


def _clean(weights: Weights) -> dict[str, Tensor]:
    """Each expert's matrices by themselves, as in files; `transformers` 5 has them stacked in its modules."""
    found: dict[str, Tensor] = {}
    for name, tensor in without_buffers(weights).items():
        prefix, _, matrix = name.rpartition(_THEIRS)
        if matrix == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        elif matrix == "down_proj":
            parts = {"down_proj": tensor}
        else:
            found[name] = tensor
            continue
        for part, stacked in parts.items():
            found |= {f"{prefix}{_THEIRS}{i}.{part}.weight": one for i, one in enumerate(stacked.unbind())}
    return found


QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _obstacles,
    _describe,
    _read,
    to_hf=_to_hf,
    from_hf=_from_hf,
    clean=_clean,
    embedding="model.embed_tokens.weight",
    output="lm_head.weight",
)
