"""A training that takes a second or two: what all small configurations of the tests have in common."""

from __future__ import annotations

from pathlib import Path

from onstep.config import ConfigContainer
from onstep.recipes import tiny_gpt_pretrain_config

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 67, "seq_length": 32}
"""The fields of a small `ModelConfig` whose vocabulary no number of ranks divides."""
GPT2 = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False,
    "activation_func": "gelu_tanh",
    "add_qkv_bias": True,
    "add_bias_linear": True,
    "share_embeddings_and_output_weights": True,
}
"""The fields of GPT-2 beside its sizes."""


def small_pretrain_config(
    corpus: Path | str, cache: Path | str, *, layers: int = 1, width: int = 16, length: int = 32
) -> ConfigContainer:
    """`tiny_gpt` with few weights on short rows of a small text; what a test is about, it sets itself."""
    config = tiny_gpt_pretrain_config()
    config.dataset.paths, config.dataset.cache_dir = [str(corpus)], str(cache)
    config.dataset.split = "80,10,10"
    config.dataset.seq_length = config.model.seq_length = length
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = layers, width, 2
    config.scheduler.lr_warmup_iters = 2
    config.validation.eval_on_start = False
    config.dist.device = "cpu"
    return config
