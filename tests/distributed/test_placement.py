"""Models that are built without values, divided between real ranks and then filled: each has one process's weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep.checkpoint import CheckpointManager
from onstep.checkpoint.components import SharingPattern, StateComponent
from onstep.checkpoint.saving import SaveRequest
from onstep.config import ConfigContainer, ModelConfig, PeftConfig
from onstep.distributed import World
from onstep.models import build_transformer
from onstep.models.hf.writing import save_hf
from onstep.training.setup.lora import add_lora
from tests.support.forked_processes import Processes
from tests.support.small_configs import GPT2
from tests.support.small_configs import SIZES as SMALL

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.placement_jobs"
TIED = {"share_embeddings_and_output_weights": True}
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
RWKV = MAMBA | {"model_type": "rwkv", "attention_hidden_size": 16}


def of_transformers(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    values = {"hf_config": {**content, **options}, "vocab_size": 67, "seq_length": 32}
    return {"model": values, "dataset": {"seq_length": 32}}


def pretrained(directory: Path) -> dict[str, Any]:
    data = {"dataset": {"seq_length": 32}, "model": {"seq_length": 32}}
    return {"checkpoint": {"pretrained_checkpoint": str(directory)}, **data}


def of_configuration() -> dict[str, Any]:
    return {
        "own": {"model": SMALL},
        "tied, bfloat16": {"model": SMALL | TIED, "optimizer": {"params_dtype": "bfloat16"}},
        "gpt2": {"model": SMALL | GPT2},
        "experts": {"model": SMALL | EXPERTS},
        "lora": {"model": SMALL, "peft": LORA},
        "lora on bfloat16": {"model": SMALL | GPT2, "peft": LORA, "mixed_precision": "bf16_mixed"},
    }


def of_transformers_classes() -> dict[str, Any]:
    return {
        "llama class": of_transformers(LLAMA),
        "tied llama class": of_transformers(LLAMA, tie_word_embeddings=True),
        "gpt2 class": of_transformers(OF_GPT2),
        "llama class, lora": {**of_transformers(LLAMA), "peft": LORA, "mixed_precision": "bf16_mixed"},
        "mamba class": of_transformers(MAMBA),
        "rwkv class, whose values cannot be drawn one by one": of_transformers(RWKV),
    }


def of_own_files(directory: Path) -> dict[str, Any]:
    """Models of directories with several files."""
    kinds = {"llama": {}, "tied": TIED, "gpt2": GPT2, "experts": QWEN3_MOE}
    for name, options in kinds.items():
        model = build_transformer(ModelConfig(**SMALL | options), seed=3)
        save_hf(model, directory / name, max_shard_bytes=4000)
    return {f"{name} files": pretrained(directory / name) for name in kinds}


def of_their_files(directory: Path) -> dict[str, Any]:
    """The same of classes of transformers, of which it converts the second one's files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, content in {"neox": NEOX, "mixtral": MIXTRAL}.items():
        torch.manual_seed(4)
        config = AutoConfig.for_model(**content)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name, max_shard_size=4000)
    return {
        "neox files": pretrained(directory / "neox"),
        "mixtral files": pretrained(directory / "mixtral"),
        "neox files, lora": pretrained(directory / "neox") | {"peft": LORA, "mixed_precision": "bf16_mixed"},
    }


def of_checkpoints(directory: Path) -> dict[str, Any]:
    """Models of checkpoints, the second one with LoRA."""
    for name, peft in {"plain": PeftConfig(), "adapted": PeftConfig(peft_scheme="lora", dim=2)}.items():
        config = ConfigContainer(model=ModelConfig(**SMALL | TIED), peft=peft)
        model = build_transformer(config.model, seed=5)
        if peft.peft_scheme is not None:
            add_lora(model, peft, seed=6)
            for parameter in model.parameters():
                nn.init.normal_(parameter)
        component = StateComponent("model", model, SharingPattern.GLOBAL)
        CheckpointManager(directory / name, World()).save(SaveRequest(1, [component], config.to_dict()))
    return {f"{name} checkpoint": pretrained(directory / name) for name in ("plain", "adapted")}


def check(
    processes: Processes, directory: Path, sizes: dict[str, int], chosen: dict[str, Any], **settings: bool
) -> None:
    ranks = sizes["dp_shard"] * sizes.get("dp_replicate", 1)
    settings_of_all = {"sizes": sizes, "cases": chosen, **settings}
    for result in processes.results(JOBS, "compare", directory, settings_of_all, ranks=ranks):
        assert result == {name: [] for name in chosen}


def test_divided_weights_are_those_of_one_process(processes: Processes, tmp_path: Path) -> None:
    processes.load("torch.distributed.fsdp", "torch.distributed.tensor")
    chosen = {name: of_configuration()[name] for name in ("tied, bfloat16", "experts")} | of_own_files(tmp_path)
    check(processes, tmp_path, {"dp_shard": 3}, chosen)


def test_what_a_hook_does_to_a_model_that_is_divided_then_is_kept(processes: Processes, tmp_path: Path) -> None:
    check(processes, tmp_path, {"dp_shard": 2}, {"own": {"model": SMALL}}, has_hook=True)


def test_a_quantized_base_and_the_files_of_another_model_are_refused(processes: Processes, tmp_path: Path) -> None:
    quantized = {"model": SMALL, "peft": {**LORA, "base_quantization": "nf4"}}
    (tmp_path / "files").mkdir()
    save_hf(build_transformer(ModelConfig(**SMALL | {"num_layers": 1}), seed=3), tmp_path / "files")
    other = {"model": SMALL, "checkpoint": {"pretrained_checkpoint": str(tmp_path / "files")}}
    for values, expected in (
        (quantized, "peft.base_quantization=nf4 cannot be divided between ranks"),
        (other, "the configuration describes a model of at least 9,264 parameters"),
    ):
        settings = {"sizes": {"dp_shard": 2}, "values": values}
        for error in processes.results(JOBS, "refusal", tmp_path, settings):
            assert expected in error, error


def test_ranks_with_different_models_are_refused_on_all_of_them(processes: Processes, tmp_path: Path) -> None:
    settings = {"sizes": {"dp_shard": 2}, "values": {"model": SMALL}, "of_rank_1": {"model": SMALL | {"num_layers": 3}}}
    for rank, error in enumerate(processes.results(JOBS, "refusal", tmp_path, settings)):
        assert error.startswith(
            f"the model of rank {1 - rank}, dp_shard {1 - rank} differs from that of rank {rank}, dp_shard {rank}: "
        ), error
        assert error.endswith("build the same model on all ranks."), error


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"dp_shard": 3}, {"dp_replicate": 2, "dp_shard": 2}])
def test_any_divided_model_has_the_weights_of_one_process(
    processes: Processes, tmp_path: Path, sizes: dict[str, int]
) -> None:
    own = of_own_files(tmp_path)
    own |= of_checkpoints(tmp_path)
    lora = {"bfloat16, lora": own["gpt2 files"] | {"peft": LORA, "mixed_precision": "bf16_mixed"}}
    check(
        processes,
        tmp_path,
        sizes,
        of_configuration() | of_transformers_classes() | own | lora | of_their_files(tmp_path),
    )


@pytest.mark.slow
@pytest.mark.process
def test_no_rank_holds_more_than_its_shards_and_one_tensor() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "sharded_build.py"
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
