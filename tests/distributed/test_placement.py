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


@pytest.mark.parametrize(("sizes"), [{"dp_shard": 2}, {"dp_shard": 3}, {"dp_replicate": 2, "dp_shard": 2}])
def test_divided_weights_are_those_of_one_process(processes: Processes, tmp_path: Path, sizes: dict[str, int]) -> None:
    ranks = sizes["dp_shard"] * sizes.get("dp_replicate", 1)
    found = processes.results(JOBS, "compare", tmp_path, {"sizes": sizes, "cases": cases(tmp_path)}, ranks=ranks)
    print(found[0])
    for result in found:
        assert result == {name: [] for name in result}
