"""Models of the Llama 3.2 family."""

from __future__ import annotations

from onstep.config import ConfigContainer, ModelConfig
from onstep.recipes.finetuning import finetuned
from onstep.recipes.large_run import SEQ_LENGTH, large_run


def llama32_1b_pretrain_config() -> ConfigContainer:
    """Llama-3.2-1B from scratch: 300,000 steps of 32 sequences of 4,096 tokens.

    With the published stretching of the rotary positions, so that published weights continue as they are.
    """
    return large_run("llama32_1b", _llama32_1b())


def llama32_1b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Llama-3.2-1B, fine-tuned on conversations.

    `peft`: None trains all of its weights, "lora" a few added ones.
    """
    return finetuned(llama32_1b_pretrain_config(), peft)


def _llama32_1b() -> ModelConfig:
    """Source: the config.json published with Llama-3.2-1B."""
    return ModelConfig(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=64,
        vocab_size=128_256,
        seq_length=SEQ_LENGTH,
        rotary_base=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        layernorm_epsilon=1e-5,
        share_embeddings_and_output_weights=True,
    )
