"""Models of the Qwen2.5 family."""

from __future__ import annotations

from onstep.config import (
    CheckpointConfig,
    ConfigContainer,
    DatasetConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    TrainingConfig,
    ValidationConfig,
)

SEQ_LENGTH = 4096
"""Tokens of a training sequence."""


def qwen25_500m_pretrain_config() -> ConfigContainer:
    """Qwen2.5-0.5B from scratch: 300,000 steps of 32 sequences of 4,096 tokens, in bfloat16 autocast.

    The sizes are the published model's. `train`, `optimizer` and `scheduler` are starting points for one node, 39
    billion tokens in all. The tokenizer is the built-in one of bytes, so that the recipe builds without a network; for
    Qwen's own, set `tokenizer.tokenizer_type=huggingface` and `tokenizer.tokenizer_model` to its folder. The vocabulary
    keeps the published size either way.
    """
    return ConfigContainer(
        run=RunConfig(recipe="qwen25_500m"),
        mixed_precision="bf16_mixed",
        model=_qwen25_500m(),
        train=TrainingConfig(micro_batch_size=1, global_batch_size=32, train_iters=300_000),
        optimizer=OptimizerConfig(
            lr=3e-4, min_lr=3e-5, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0
        ),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=500),
        dataset=DatasetConfig(seq_length=SEQ_LENGTH),
        validation=ValidationConfig(eval_interval=500, eval_iters=32),
        logger=LoggerConfig(log_interval=10),
        checkpoint=CheckpointConfig(save_interval=500, most_recent_k=3, keep_every_n=10_000),
    )


def _qwen25_500m() -> ModelConfig:
    """Source: the config.json published with Qwen2.5-0.5B."""
    return ModelConfig(
        num_layers=24,
        hidden_size=896,
        ffn_hidden_size=4864,
        num_attention_heads=14,
        num_query_groups=2,
        kv_channels=64,
        vocab_size=151_936,
        seq_length=SEQ_LENGTH,
        rotary_base=1_000_000.0,
        layernorm_epsilon=1e-6,
        add_qkv_bias=True,
        share_embeddings_and_output_weights=True,
    )
