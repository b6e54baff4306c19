"""The configurations that Megatron Bridge writes for six of its recipes (`bridge_recipes.json`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WRITTEN = json.loads((Path(__file__).with_name("bridge_recipes.json")).read_text("utf-8"))
FIRST = WRITTEN["qwen25_500m"]
RECIPES: dict[str, dict[str, Any]] = {
    "qwen25_500m": FIRST,
    **{name: {**FIRST, **others} for name, others in WRITTEN["differences"].items()},
}
REFUSED = {
    "qwen25_500m": set(),
    "qwen3_600m": set(),
    "llama32_1b": set(),
    "llama3_8b": {"model.context_parallel_size"},
    "gemma2_2b": {
        "model.attn_logit_softcapping",
        "model.final_logit_softcapping",
        "model.layernorm_zero_centered_gamma",
        "model.query_pre_attn_scalar",
        "model.transformer_layer_spec",
        "model.window_size",
    },
    "qwen3_30b_a3b": {
        "model.expert_model_parallel_size",
    },
}
"""The keys of each recipe whose values ask for what does not exist here."""
BESIDE_OTHERS = {
    "model.tensor_model_parallel_size",
    "model.sequence_parallel",
    "model.pipeline_model_parallel_size",
}
"""Keys that are refused beside others of these recipes: the distributed optimizer and experts."""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"_target_": "megatron.bridge.training.config.ConfigContainer"}
    for key, value in flat.items():
        section, dot, name = key.partition(".")
        if dot:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return values


def of_recipe(name: str, **changes: Any) -> dict[str, Any]:
    return nested(
        {key: value for key, value in RECIPES[name].items() if key not in REFUSED[name] | BESIDE_OTHERS} | changes
    )
