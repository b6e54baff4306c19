"""The smallest GPT-2."""

from __future__ import annotations

from onstep.config import ConfigContainer, ModelConfig
from onstep.recipes.finetuning import finetuned
from onstep.recipes.large_run import large_run


def gpt2_124m_pretrain_config() -> ConfigContainer:
    """GPT-2 with 124 million parameters from scratch: 20,000 steps of 480 sequences of 1,024 tokens.

    The sizes are the published model's, 10 billion tokens in all; dropout is left out, as one pass over the data needs
    none.
    """
    config = large_run("gpt2_124m", _gpt2_124m(), lr=6e-4, global_batch_size=480, train_iters=20_000)
    config.train.micro_batch_size = 12
    config.scheduler.lr_warmup_iters = 700
    return config


def gpt2_124m_finetune_config(peft: str | None = None) -> ConfigContainer:
    """GPT-2 124M, fine-tuned on conversations.

    `peft`: None trains all of its weights, "lora" a few added ones.
    """
    config = finetuned(gpt2_124m_pretrain_config(), peft, full_lr=5e-5)
    config.train.micro_batch_size = 2
    return config


def _gpt2_124m() -> ModelConfig:
    """Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, and its
    config.json."""
    return ModelConfig(
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
