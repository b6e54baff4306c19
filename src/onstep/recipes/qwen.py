"""Qwen2.5 and the mixture of experts of Qwen3."""

from __future__ import annotations

from onstep.config import (
    ConfigContainer,
    ModelConfig,
)
from onstep.recipes.finetuning import finetuned
from onstep.recipes.published import SEQ_LENGTH, large_run


def qwen25_500m_pretrain_config() -> ConfigContainer:
    """Qwen2.5-0.5B from scratch: 300,000 steps of 32 sequences of 4,096 tokens, 39 billion tokens in total.

    The sizes are the published model's; see `onstep recipes show qwen25_500m` for the rest.
    """
    return large_run("qwen25_500m", _qwen25(24, 896, 4864, heads=14, groups=2))


def qwen25_500m_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-0.5B, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(qwen25_500m_pretrain_config(), peft)


def qwen25_1p5b_pretrain_config() -> ConfigContainer:
    """Qwen2.5-1.5B from scratch: 300,000 steps of 32 sequences of 4,096 tokens."""
    return large_run("qwen25_1p5b", _qwen25(28, 1536, 8960, heads=12, groups=2), lr=2e-4)


def qwen25_1p5b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-1.5B, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(qwen25_1p5b_pretrain_config(), peft)


def qwen25_3b_pretrain_config() -> ConfigContainer:
    """Qwen2.5-3B from scratch: 300,000 steps of 64 sequences of 4,096 tokens."""
    model = _qwen25(36, 2048, 11008, heads=16, groups=2)
    return large_run("qwen25_3b", model, lr=2e-4, global_batch_size=64)


def qwen25_3b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-3B, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(qwen25_3b_pretrain_config(), peft)


def qwen25_7b_pretrain_config() -> ConfigContainer:
    """Qwen2.5-7B from scratch: 300,000 steps of 128 sequences of 4,096 tokens."""
    model = _qwen25(28, 3584, 18944, heads=28, groups=4, vocab_size=152_064, tied=False)
    model.recompute_granularity = "full"
    return large_run("qwen25_7b", model, lr=1.5e-4, global_batch_size=128)


def qwen25_7b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-7B, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(qwen25_7b_pretrain_config(), peft)


def qwen25_14b_pretrain_config() -> ConfigContainer:
    """Qwen2.5-14B from scratch: 300,000 steps of 128 sequences of 4,096 tokens."""
    model = _qwen25(48, 5120, 13824, heads=40, groups=8, vocab_size=152_064, tied=False)
    model.layernorm_epsilon, model.recompute_granularity = 1e-5, "full"
    return large_run("qwen25_14b", model, lr=1.5e-4, global_batch_size=128)


def qwen25_14b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-14B, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(qwen25_14b_pretrain_config(), peft)


def _qwen25(
    layers: int, hidden: int, ffn: int, *, heads: int, groups: int, vocab_size: int = 151_936, tied: bool = True
) -> ModelConfig:
    """Source: the config.json published with each size of Qwen2.5."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        vocab_size=vocab_size,
        seq_length=SEQ_LENGTH,
        rotary_base=1_000_000.0,
        layernorm_epsilon=1e-6,
        add_qkv_bias=True,
        share_embeddings_and_output_weights=tied,
    )


def qwen3_30b_a3b_pretrain_config() -> ConfigContainer:
    """Qwen3-30B-A3B from scratch: 128 experts per layer, 8 of them per token.

    300,000 steps of 256 sequences of 4,096 tokens; the sizes are the published model's. Every rank holds the whole
    model, and 30 billion parameters with gradients and optimizer state need more memory than a single GPU has: `onstep
    memory qwen3_30b_a3b` shows how much.

    Source: the config.json published with Qwen3-30B-A3B.
    """
    model = ModelConfig(
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
    return large_run("qwen3_30b_a3b", model, global_batch_size=256)


def qwen3_30b_a3b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen3-30B-A3B, fine-tuned on conversations.

    LoRA only adds matrices to the attention; the experts are frozen.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(qwen3_30b_a3b_pretrain_config(), peft)
