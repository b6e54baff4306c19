"""A transformer small enough for a laptop's CPU."""

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


def tiny_gpt_pretrain_config() -> ConfigContainer:
    """About a million parameters on bytes of text: 1,500 steps of 8 sequences of 128 bytes.

    The text is the source of Python's own standard library unless `dataset.paths` names another. The micro-batch is the
    global batch over the ranks, so one rank and several train the same run.
    """
    return ConfigContainer(
        run=RunConfig(recipe="tiny_gpt"),
        train=TrainingConfig(global_batch_size=8, train_iters=1500),
        model=ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128),
        optimizer=OptimizerConfig(
            lr=3e-3, min_lr=3e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0
        ),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=75),
        dataset=DatasetConfig(seq_length=128, num_workers=0),
        validation=ValidationConfig(eval_interval=250, eval_iters=20, eval_on_start=True),
        logger=LoggerConfig(log_interval=25),
        checkpoint=CheckpointConfig(save_interval=100, most_recent_k=3),
    )
