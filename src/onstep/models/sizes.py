"""The sizes of a model that follow from its configuration, and the check that it can be built."""

from __future__ import annotations

from onstep.config.load import check_values
from onstep.config.model_config import default_ffn_hidden_size
from onstep.config.model_rules import check_expert_options, check_model
from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError

_COUNTS = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")
_OPTIONAL_COUNTS = ("ffn_hidden_size", "num_query_groups", "kv_channels")


def head_width(config: ModelConfig) -> int:
    """Elements of one attention head."""
    if config.kv_channels is not None:
        return config.kv_channels
    return config.hidden_size // config.num_attention_heads


def num_query_groups(config: ModelConfig) -> int:
    """Key/value heads; each serves `num_attention_heads / num_query_groups` query heads."""
    return config.num_attention_heads if config.num_query_groups is None else config.num_query_groups


def ffn_hidden_size(config: ModelConfig) -> int:
    """Width of the feed-forward block.

    Where it is not configured, a gated one is 8/3 of the hidden size wide, rounded up to a multiple of 64, and one
    without a gate 4 times the hidden size.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), section 3.1: two thirds of the classic 4x keep the
    number of parameters when a third matrix is added.
    """
    return config.ffn_hidden_size or default_ffn_hidden_size(config)


def vocabulary_size(config: ModelConfig) -> int:
    """Rows of the embedding.

    Raises:
        ConfigError: where the configuration leaves it to the tokenizer, which a model does not know.
    """
    if config.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is None, but a model needs the size of its vocabulary; "
            "set it to the tokenizer's vocabulary size."
        )
    return config.vocab_size


def check_model_config(config: ModelConfig) -> None:
    """Check that a `Transformer` can be built from `config`.

    Raises:
        ConfigError: naming the first value that cannot work, the rule and the remedy.
    """
    vocabulary_size(config)
    for name in _COUNTS + _OPTIONAL_COUNTS:
        value = getattr(config, name)
        if value is None and name in _OPTIONAL_COUNTS:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"model.{name} must be a whole number >= 1, got {value!r}.")
    check_values({f"model.{name}": getattr(config, name) for name in config.field_names()})
    check_model(config)
    check_expert_options(config)
