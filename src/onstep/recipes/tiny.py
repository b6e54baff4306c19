"""Provides recipes for transformers small enough for a laptop's CPU: a dense one and a mixture of experts."""

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
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from onstep.recipes.finetuning import finetuned

SEQ_LENGTH = 128
"""Bytes per training sequence."""
DEMO_SEQ_LENGTH = 256
"""Tokens per training sequence of the demo."""


def tiny_gpt_pretrain_config() -> ConfigContainer:
    """About a million parameters on bytes of text: 1,500 steps of 8 sequences of 128 bytes.

    The text is the source code of Python's standard library unless `dataset.paths` is set. The global batch is divided
    evenly among the ranks, so training is the same with one rank or several.
    """
    model = ModelConfig(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=SEQ_LENGTH)
    return tiny_run("tiny_gpt", model)


def tiny_gpt_finetune_config(peft: str | None = None) -> ConfigContainer:
    """A trained tiny_gpt, taught to answer.

    Set `checkpoint.pretrained_checkpoint` (such as runs/tiny_gpt) and `dataset.paths` (JSONL with conversations).

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(tiny_gpt_pretrain_config(), peft, full_lr=3e-4)


def tiny_run(name: str, model: ModelConfig) -> ConfigContainer:
    """Everything except the model of the laptop-sized recipes."""
    return ConfigContainer(
        run=RunConfig(recipe=name),
        train=TrainingConfig(global_batch_size=8, train_iters=1500),
        model=model,
        optimizer=OptimizerConfig(
            lr=3e-3, min_lr=3e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0
        ),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=75),
        dataset=DatasetConfig(seq_length=SEQ_LENGTH, num_workers=0),
        validation=ValidationConfig(eval_interval=250, eval_iters=20, eval_on_start=True),
        logger=LoggerConfig(log_interval=25),
        checkpoint=CheckpointConfig(save_interval=100, most_recent_k=3),
    )


def tiny_moe_pretrain_config() -> ConfigContainer:
    """tiny_gpt with 8 experts per layer, 2 of them per token: the same number of multiplications per token.

    The load of the experts is balanced by an auxiliary loss per micro-batch. Queries and keys are normalized as in
    Qwen3-MoE, the architecture under which `transformers` opens the weights.
    """
    model = ModelConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        qk_layernorm=True,
        num_moe_experts=8,
        moe_ffn_hidden_size=192,
        moe_router_topk=2,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.01,
    )
    return tiny_run("tiny_moe", model)


def tiny_moe_finetune_config(peft: str | None = None) -> ConfigContainer:
    """A trained tiny_moe, taught to answer.

    Set `checkpoint.pretrained_checkpoint` (such as runs/tiny_moe) and `dataset.paths` (JSONL with conversations).

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    return finetuned(tiny_moe_pretrain_config(), peft, full_lr=3e-4)


def demo_pretrain_config() -> ConfigContainer:
    """The model of `onstep demo`: two layers on 2,048 tokens learned from the text, trained for 800 steps by Muon.

    It costs about as much as tiny_gpt, and writes better: a token has three bytes of Python on average, so the same
    number of them covers three times the text, and a context of 256 reaches as far back as 800 bytes.
    """
    model = ModelConfig(num_layers=2, hidden_size=128, num_attention_heads=4, seq_length=DEMO_SEQ_LENGTH)
    config = tiny_run("demo", model)
    config.tokenizer = TokenizerConfig(tokenizer_type="bpe", vocab_size=2048)
    config.dataset.seq_length = DEMO_SEQ_LENGTH
    config.train.train_iters, config.scheduler.lr_warmup_iters = 800, 40
    config.optimizer.optimizer, config.optimizer.lr, config.optimizer.min_lr = "muon", 8e-3, 0.0
    config.logger.log_interval, config.logger.log_first_step = 80, True
    config.validation.eval_interval, config.validation.eval_iters = 400, 10
    config.checkpoint.save_interval = 200
    return config


def demo_finetune_config(peft: str | None = None) -> ConfigContainer:
    """A trained demo, taught to answer.

    Set `checkpoint.pretrained_checkpoint` (such as runs/demo) and `dataset.paths` (JSONL with conversations).

    Args:
        peft: `lora` to train low-rank adapters only, None to train all weights.
    """
    config = finetuned(demo_pretrain_config(), peft, full_lr=3e-4)
    config.tokenizer = TokenizerConfig()  # that of the weights
    return config
