"""Derives the sizes of a model from its configuration and checks that the model can be built."""

from __future__ import annotations

from onstep.config import ModelConfig
from onstep.config.checks.model import check_expert_options, check_model
from onstep.config.checks.single_values import check_values
from onstep.config.sections.model import default_ffn_hidden_size
from onstep.errors import ConfigError


def head_width(config: ModelConfig) -> int:
    """Size of an attention head.

    Args:
        config: the section `model` of a configuration.
    """
    if config.kv_channels is not None:
        return config.kv_channels
    return config.hidden_size // config.num_attention_heads


def num_query_groups(config: ModelConfig) -> int:
    """Number of key/value heads; each serves `num_attention_heads / num_query_groups` query heads.

    Args:
        config: the section `model` of a configuration.
    """
    return config.num_attention_heads if config.num_query_groups is None else config.num_query_groups


def ffn_hidden_size(config: ModelConfig) -> int:
    """Width of the feed-forward block.

    If it is not configured: with a gate, 8/3 of the hidden size, rounded up to a multiple of 64; without a gate, 4
    times the hidden size.

    Args:
        config: the section `model` of a configuration.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), section 3.1: two thirds of the usual 4x keeps the
    number of parameters constant when a third matrix is added.
    """
    return config.ffn_hidden_size or default_ffn_hidden_size(config.hidden_size, config.gated_linear_unit)


def vocabulary_size(config: ModelConfig) -> int:
    """Number of rows of the embedding.

    Raises:
        ConfigError: if the configuration leaves it to the tokenizer, which is unknown to a model.
    """
    if config.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is None, but a model requires the size of its vocabulary; "
            "set it to the tokenizer's vocabulary size."
        )
    return config.vocab_size


def check_model_config(config: ModelConfig) -> None:
    """Check that a `Transformer` can be built from `config`.

    Raises:
        ConfigError: naming the first invalid value, the rule and the remedy.
    """
    vocabulary_size(config)
    check_values(config, "model.")
    check_model(config)
    check_expert_options(config)
