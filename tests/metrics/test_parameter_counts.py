"""Counts of weights from sizes alone: against the models themselves, ours and those of `transformers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from onstep.config import ModelConfig, PeftConfig
from onstep.metrics import ModelShape
from onstep.metrics.model_shape import (
    num_active_parameters,
    num_expert_matrix_parameters,
    num_layer_matrix_parameters,
    num_lora_parameters,
    num_parameters,
)
from onstep.models import Transformer, build_transformer
from onstep.optim.param_groups import trainable_parameters
from onstep.training.setup.lora import add_lora

DENSE = ModelConfig(num_layers=3, hidden_size=48, num_attention_heads=4, vocab_size=96, seq_length=32)
MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}
SHARED = {**MOE, "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
GPT = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"share_embeddings_and_output_weights": True},
    "grouped": {"num_query_groups": 2, "kv_channels": 16},
    "gpt": GPT,
    "normed heads": {"qk_layernorm": True},
    "normed heads with biases": {"qk_layernorm": True, "normalization": "LayerNorm"},
    "experts": MOE,
    "shared expert": SHARED,
    "everything": {**GPT, **SHARED, "qk_layernorm": True, "mtp_num_layers": 2},
    "further tokens": {"mtp_num_layers": 2},
}


def shape_of(config: ModelConfig) -> ModelShape:
    shape = ModelShape.of(config)
    assert shape is not None
    return shape


@pytest.mark.parametrize("options", OPTIONS)
def test_the_count_is_that_of_the_model(options: str) -> None:
    config = replace(DENSE, **OPTIONS[options])
    with torch.device("meta"):
        model = Transformer(config)
    assert num_parameters(shape_of(config)) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("options", OPTIONS)
def test_matrices_of_layers_are_those_that_muon_takes(options: str) -> None:
    config = replace(DENSE, **OPTIONS[options])
    roles = trainable_parameters([build_transformer(config, seed=0)])
    taken = sum(parameter.numel() for parameter, role in roles.items() if role.is_layer_matrix)
    assert num_layer_matrix_parameters(shape_of(config)) == taken
    stacked = sum(parameter.numel() for parameter in roles if parameter.ndim == 3)
    assert num_expert_matrix_parameters(shape_of(config)) == stacked


def test_a_token_meets_all_but_the_experts_that_it_does_not_go_to() -> None:
    config = replace(DENSE, **SHARED)
    idle = 2 * 2 * 3 * 48 * 24  # 2 layers with 2 of 4 experts idle, each of 3 matrices
    assert num_active_parameters(shape_of(config)) == num_parameters(shape_of(config)) - idle
    assert num_active_parameters(shape_of(DENSE)) == num_parameters(shape_of(DENSE))


@pytest.mark.parametrize("options", ["dense", "grouped", "gpt", "shared expert", "further tokens"])
@pytest.mark.parametrize("targets", [None, ["query", "v_proj"], ["layers.1.attention.key", "mlp.down_proj"], ["up"]])
def test_the_count_of_lora_is_what_it_adds(options: str, targets: list[str] | None) -> None:
    config = replace(DENSE, **OPTIONS[options])
    model = build_transformer(config, seed=0)
    before = sum(parameter.numel() for parameter in model.parameters())
    add_lora(model, PeftConfig("lora", dim=4, target_modules=targets), seed=0)
    added = sum(parameter.numel() for parameter in model.parameters()) - before
    assert added > 0
    assert num_lora_parameters(shape_of(config), 4, targets) == added
