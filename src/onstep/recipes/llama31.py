"""Llama 3.1."""

from __future__ import annotations

from onstep.config import ConfigContainer, ModelConfig
from onstep.recipes.finetuning import finetuned
from onstep.recipes.published import SEQ_LENGTH, large_run


def llama31_8b_pretrain_config() -> ConfigContainer:
    """Llama-3.1-8B from scratch: 300,000 steps of 128 sequences of 4,096 tokens."""
    return large_run("llama31_8b", _llama31(32, 4096, 14336, heads=32), lr=1.5e-4, global_batch_size=128)


def llama31_8b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Llama-3.1-8B, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(llama31_8b_pretrain_config(), peft)


def llama31_70b_pretrain_config() -> ConfigContainer:
    """Llama-3.1-70B from scratch: 300,000 steps of 256 sequences of 4,096 tokens."""
    return large_run("llama31_70b", _llama31(80, 8192, 28672, heads=64), lr=1.5e-4, global_batch_size=256)


def llama31_70b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Llama-3.1-70B, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(llama31_70b_pretrain_config(), peft)


def _llama31(layers: int, hidden: int, ffn: int, *, heads: int) -> ModelConfig:
    """Source: the config.json published with each size of Llama 3.1."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=128_256,
        seq_length=SEQ_LENGTH,
        rotary_base=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        layernorm_epsilon=1e-5,
        recompute_granularity="full",
    )
