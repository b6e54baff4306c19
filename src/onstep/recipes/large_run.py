"""What the recipes of published models have in common: everything but the model."""

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
"""Tokens of a training sequence, where a model takes that many."""


def large_run(
    name: str, model: ModelConfig, *, lr: float = 3e-4, global_batch_size: int = 32, train_iters: int = 300_000
) -> ConfigContainer:
    """A run in bfloat16 autocast for one node; `train`, `optimizer` and `scheduler` are starting points.

    The tokenizer is the built-in one of bytes, so that a recipe builds without a network; for the model's own, set
    `tokenizer.tokenizer_type=huggingface` and `tokenizer.tokenizer_model` to its folder. The vocabulary keeps the
    published size either way.

    Args:
        name: the recipe's.
        model: its `seq_length` is that of the data too.
        lr: peak learning rate; the schedule ends at a tenth of it.
        global_batch_size: sequences of a step.
        train_iters: steps.
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
