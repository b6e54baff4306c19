"""GPT-2, Llama 3.2, and the recipe that fine-tunes any weights."""

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
from onstep.recipes.finetuning import FULL_LR, finetuned

SEQ_LENGTH = 4096
"""Tokens per training sequence, unless a model supports fewer."""


def large_run(
    name: str, model: ModelConfig, *, lr: float = 3e-4, global_batch_size: int = 32, train_iters: int = 300_000
) -> ConfigContainer:
    """A run on one node with bfloat16 autocast; `train`, `optimizer` and `scheduler` are starting points.

    The tokenizer is the built-in byte tokenizer, so that a recipe builds without a network; for the model's own, set
    `tokenizer.tokenizer_type=huggingface` and `tokenizer.tokenizer_model` to its directory. The vocabulary has the
    published size either way. The data has the model's `seq_length`; the schedule ends at a tenth of `lr`.
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


def any_pretrain_config() -> ConfigContainer:
    """Any pretrained model, trained further on text (`onstep train --hf-model`).

    The model section is filled from the weights in `checkpoint.pretrained_checkpoint`. Sequences have 1,024 tokens; the
    learning rate is that of fine-tuning, a tenth of one for training from scratch or less.
    """
    config = large_run("any", ModelConfig(seq_length=1024), lr=FULL_LR, global_batch_size=16, train_iters=1000)
    config.train.micro_batch_size = 2
    config.scheduler.lr_warmup_iters = 50
    config.validation.eval_interval, config.checkpoint.save_interval = 100, 200
    return config


def any_finetune_config(peft: str | None = None) -> ConfigContainer:
    """Any model, fine-tuned on conversations.

    The model section is filled from the weights in `checkpoint.pretrained_checkpoint`. Sequences have 1,024 tokens.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    config = finetuned(large_run("any", ModelConfig(seq_length=1024)), peft)
    config.train.micro_batch_size = 2
    return config


def gpt2_124m_pretrain_config() -> ConfigContainer:
    """GPT-2 with 124 million parameters from scratch: 20,000 steps of 480 sequences of 1,024 tokens.

    The sizes are the published model's, with 10 billion tokens in total; there is no dropout, since a single epoch does
    not need it.

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
    """GPT-2 124M, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    config = finetuned(gpt2_124m_pretrain_config(), peft, full_lr=5e-5)
    config.train.micro_batch_size = 2
    return config


def llama32_1b_pretrain_config() -> ConfigContainer:
    """Llama-3.2-1B from scratch: 300,000 steps of 32 sequences of 4,096 tokens.

    Uses the published rope scaling, so that published weights can be trained further unchanged.

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
    """Llama-3.2-1B, fine-tuned on conversations.

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(llama32_1b_pretrain_config(), peft)
