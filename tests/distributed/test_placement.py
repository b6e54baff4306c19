"""Models that are built without values, divided between real ranks and then filled: each has one process's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.config import ModelConfig
from onstep.models import build_transformer
from onstep.models.hf.directory import save_hf
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.placement_jobs"
SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 67, "seq_length": 32}
TIED = {"share_embeddings_and_output_weights": True}
GPT2 = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False,
    "activation_func": "gelu_tanh",
    "add_qkv_bias": True,
    "add_bias_linear": True,
    **TIED,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
QWEN3_MOE = {"qk_layernorm": True, "num_moe_experts": 4, "moe_router_topk": 2}
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
MIXTRAL = NEOX | {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4}
LORA = {"peft_scheme": "lora", "dim": 2}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
OF_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 67,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MAMBA = {"model_type": "mamba", "vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}


def of_transformers(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    values = {"hf_config": {**content, **options}, "vocab_size": 67, "seq_length": 32}
    return {"model": values, "dataset": {"seq_length": 32}}


def pretrained(directory: Path, **options: Any) -> dict[str, Any]:
    return {"checkpoint": {"pretrained_checkpoint": str(directory)}, "dataset": {"seq_length": 32}, **options}


def of_files(directory: Path) -> dict[str, Any]:
    """Models of directories, most with several files."""
    kinds = {"llama": {}, "tied": TIED, "gpt2": GPT2, "experts": QWEN3_MOE}
    for name, options in kinds.items():
        model = build_transformer(ModelConfig(**SMALL | options), seed=3)
        save_hf(model, directory / name, max_shard_bytes=4000)
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, content in {"neox": NEOX, "mixtral": MIXTRAL}.items():
        torch.manual_seed(4)
        config = AutoConfig.for_model(**content)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name, max_shard_size=4000)
    found = {name: pretrained(directory / name, model={"seq_length": 32}) for name in (*kinds, "neox", "mixtral")}
    found["bfloat16, lora"] = {**found["gpt2"], "peft": LORA, "mixed_precision": "bf16_mixed"}
    found["neox, lora"] = {**found["neox"], "peft": LORA, "mixed_precision": "bf16_mixed"}
    return found


def cases(directory: Path) -> dict[str, Any]:
    return {
        "own": {"model": SMALL},
        "tied, bfloat16": {"model": SMALL | TIED, "optimizer": {"params_dtype": "bfloat16"}},
        "gpt2": {"model": SMALL | GPT2},
        "experts": {"model": SMALL | EXPERTS},
        "lora": {"model": SMALL, "peft": LORA},
        "lora on bfloat16": {"model": SMALL | GPT2, "peft": LORA, "mixed_precision": "bf16_mixed"},
        "llama of transformers": of_transformers(LLAMA),
        "tied llama of transformers": of_transformers(LLAMA, tie_word_embeddings=True),
        "gpt2 of transformers": of_transformers(OF_GPT2),
        "llama of transformers, lora": {**of_transformers(LLAMA), "peft": LORA, "mixed_precision": "bf16_mixed"},
        "mamba of transformers": of_transformers(MAMBA),
    }


SIZES = [{"dp_shard": 2}, {"dp_shard": 3}, {"dp_replicate": 2, "dp_shard": 2}]


@pytest.mark.parametrize("sizes", SIZES)
def test_divided_weights_are_those_of_one_process(processes: Processes, tmp_path: Path, sizes: dict[str, int]) -> None:
    ranks = sizes["dp_shard"] * sizes.get("dp_replicate", 1)
    settings = {"sizes": sizes, "cases": cases(tmp_path) | of_files(tmp_path)}
    for result in processes.results(JOBS, "compare", tmp_path, settings, ranks=ranks):
        assert result == {name: [] for name in result}
