"""Mixtures of experts of the Qwen3 family."""

from __future__ import annotations

from onstep.config import ConfigContainer, ModelConfig
from onstep.recipes.finetuning import finetuned
from onstep.recipes.large_run import SEQ_LENGTH, large_run


def qwen3_30b_a3b_pretrain_config() -> ConfigContainer:
    """Qwen3-30B-A3B from scratch: 128 experts a layer, of which a token takes 8.

    300,000 steps of 256 sequences of 4,096 tokens; the sizes are the published model's. Every rank holds the whole
    model, and 30 billion parameters with gradients and optimizer take more memory than one GPU has: `onstep memory
    qwen3_30b_a3b` tells how much.
    """
    return large_run("qwen3_30b_a3b", _qwen3_30b_a3b(), global_batch_size=256)


def qwen3_30b_a3b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen3-30B-A3B, fine-tuned on conversations.

    `peft`: None trains all of its weights, "lora" a few added ones.
    LoRA's matrices go to the attention: the experts stay as they are.
    """
    return finetuned(qwen3_30b_a3b_pretrain_config(), peft)


def _qwen3_30b_a3b() -> ModelConfig:
    """Source: the config.json published with Qwen3-30B-A3B."""
    return ModelConfig(
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        vocab_size=151_936,
        seq_length=SEQ_LENGTH,
        rotary_base=1_000_000.0,
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        recompute_granularity="full",
        num_moe_experts=128,
        moe_ffn_hidden_size=768,
        moe_router_topk=8,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1e-3,
    )
