"""Published models (GPT-2, Llama 3.2, Qwen2.5, the mixtures of experts of Qwen3), and the recipe for any weights."""

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
from onstep.recipes.finetuning import finetuned

SEQ_LENGTH = 4096
"""Tokens of a training sequence, where a model takes that many."""


def large_run(
    name: str, model: ModelConfig, *, lr: float = 3e-4, global_batch_size: int = 32, train_iters: int = 300_000
) -> ConfigContainer:
    """A run in bfloat16 autocast for one node; `train`, `optimizer` and `scheduler` are starting points.

    The tokenizer is the built-in one of bytes, so that a recipe builds without a network; for the model's own, set
    `tokenizer.tokenizer_type=huggingface` and `tokenizer.tokenizer_model` to its folder. The vocabulary keeps the
    published size either way. The model's `seq_length` is that of the data too; the schedule ends at a tenth of `lr`.
    """
    return ConfigContainer(
        run=RunConfig(recipe=name),
        mixed_precision="bf16_mixed",
        model=model,
        train=TrainingConfig(micro_batch_size=1, global_batch_size=global_batch_size, train_iters=train_iters),
        optimizer=OptimizerConfig(
            lr=lr, min_lr=lr / 10, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0
        ),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=500),
        dataset=DatasetConfig(seq_length=model.seq_length),
        validation=ValidationConfig(eval_interval=500, eval_iters=32),
        logger=LoggerConfig(log_interval=10),
        checkpoint=CheckpointConfig(save_interval=500, most_recent_k=3, keep_every_n=10_000),
    )


def any_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Whatever model the weights are of, fine-tuned on conversations.

    The model section is left to the weights: it is filled from `checkpoint.pretrained_checkpoint`. Sequences are of
    1,024 tokens.
    """
    config = finetuned(large_run("any", ModelConfig(seq_length=1024)), peft)
    config.train.micro_batch_size = 2
    return config


def gpt2_124m_pretrain_config() -> ConfigContainer:
    """GPT-2 with 124 million parameters from scratch: 20,000 steps of 480 sequences of 1,024 tokens.

    The sizes are the published model's, 10 billion tokens in all; dropout is left out, as one pass over the data needs
    none.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, and its config.json.
    """
    model = ModelConfig(
        num_layers=12,
        hidden_size=768,
        ffn_hidden_size=3072,
        num_attention_heads=12,
        vocab_size=50_257,
        seq_length=1024,
        normalization="LayerNorm",
        layernorm_epsilon=1e-5,
        position_embedding_type="learned_absolute",
        gated_linear_unit=False,
        activation_func="gelu_tanh",
        add_qkv_bias=True,
        add_bias_linear=True,
        share_embeddings_and_output_weights=True,
    )
    config = large_run("gpt2_124m", model, lr=6e-4, global_batch_size=480, train_iters=20_000)
    config.train.micro_batch_size = 12
    config.scheduler.lr_warmup_iters = 700
    return config


def gpt2_124m_finetune_config(peft: str | None = None) -> ConfigContainer:
    """GPT-2 124M, fine-tuned on conversations."""
    config = finetuned(gpt2_124m_pretrain_config(), peft, full_lr=5e-5)
    config.train.micro_batch_size = 2
    return config


def llama32_1b_pretrain_config() -> ConfigContainer:
    """Llama-3.2-1B from scratch: 300,000 steps of 32 sequences of 4,096 tokens.

    With the published stretching of the rotary positions, so that published weights continue as they are.

    Source: the config.json published with Llama-3.2-1B.
    """
    model = ModelConfig(
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
    return large_run("llama32_1b", model)


def llama32_1b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Llama-3.2-1B, fine-tuned on conversations."""
    return finetuned(llama32_1b_pretrain_config(), peft)


def qwen25_500m_pretrain_config() -> ConfigContainer:
    """Qwen2.5-0.5B from scratch: 300,000 steps of 32 sequences of 4,096 tokens, 39 billion tokens in all.

    The sizes are the published model's; see `onstep recipes show qwen25_500m` for the rest.
    """
    return large_run("qwen25_500m", _qwen25(24, 896, 4864, heads=14, groups=2))


def qwen25_500m_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-0.5B, fine-tuned on conversations."""
    return finetuned(qwen25_500m_pretrain_config(), peft)


def qwen25_1p5b_pretrain_config() -> ConfigContainer:
    """Qwen2.5-1.5B from scratch: 300,000 steps of 32 sequences of 4,096 tokens."""
    return large_run("qwen25_1p5b", _qwen25(28, 1536, 8960, heads=12, groups=2), lr=2e-4)


def qwen25_1p5b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-1.5B, fine-tuned on conversations."""
    return finetuned(qwen25_1p5b_pretrain_config(), peft)


def qwen25_3b_pretrain_config() -> ConfigContainer:
    """Qwen2.5-3B from scratch: 300,000 steps of 64 sequences of 4,096 tokens."""
    model = _qwen25(36, 2048, 11008, heads=16, groups=2)
    return large_run("qwen25_3b", model, lr=2e-4, global_batch_size=64)


def qwen25_3b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-3B, fine-tuned on conversations."""
    return finetuned(qwen25_3b_pretrain_config(), peft)


def qwen25_7b_pretrain_config() -> ConfigContainer:
    """Qwen2.5-7B from scratch: 300,000 steps of 128 sequences of 4,096 tokens."""
    model = _qwen25(28, 3584, 18944, heads=28, groups=4, vocab_size=152_064, tied=False)
    model.recompute_granularity = "full"
    return large_run("qwen25_7b", model, lr=1.5e-4, global_batch_size=128)


def qwen25_7b_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Qwen2.5-7B, fine-tuned on conversations."""
    return finetuned(qwen25_7b_pretrain_config(), peft)


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
    """Qwen3-30B-A3B from scratch: 128 experts a layer, of which a token takes 8.

    300,000 steps of 256 sequences of 4,096 tokens; the sizes are the published model's. Every rank holds the whole
    model, and 30 billion parameters with gradients and optimizer take more memory than one GPU has: `onstep memory
    qwen3_30b_a3b` tells how much.

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

    LoRA's matrices go to the attention: the experts stay as they are.
    """
    return finetuned(qwen3_30b_a3b_pretrain_config(), peft)
