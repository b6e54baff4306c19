"""The sizes of a model that follow from its configuration, and the rules they obey."""

from __future__ import annotations

import math
from typing import Any

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError

_FFN_MULTIPLE = 64

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
    """Width of the SwiGLU: as configured, or 8/3 of the hidden size rounded up to a multiple of 64.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), section 3.1: two thirds of the classic 4x keep the
    number of parameters when a third matrix is added.
    """
    if config.ffn_hidden_size is not None:
        return config.ffn_hidden_size
    return math.ceil(8 * config.hidden_size / (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE


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
    for name in _COUNTS:
        _check_count(name, getattr(config, name))
    for name in _OPTIONAL_COUNTS:
        if getattr(config, name) is not None:
            _check_count(name, getattr(config, name))
    _check_heads(config)
    _check_numbers(config)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model.{name} must be a whole number >= 1, got {value!r}.")


def _check_heads(config: ModelConfig) -> None:
    heads, groups = config.num_attention_heads, num_query_groups(config)
    if config.kv_channels is None and config.hidden_size % heads:
        raise ConfigError(
            f"model.hidden_size must be a multiple of num_attention_heads, got {config.hidden_size} and {heads}; "
            "change one of them, or set kv_channels (the width of a head)."
        )
    if heads % groups:
        raise ConfigError(
            f"model.num_attention_heads must be a multiple of num_query_groups, got {heads} and {groups}; "
            f"each key/value head serves the same number of query heads."
        )
    if head_width(config) % 2:
        raise ConfigError(
            f"the width of a head must be even for rotary embeddings, got {head_width(config)} "
            f"(hidden_size {config.hidden_size}, {heads} heads, kv_channels {config.kv_channels}); "
            "change the number of heads, or set an even kv_channels."
        )


def _check_numbers(config: ModelConfig) -> None:
    for name in ("rotary_base", "layernorm_epsilon"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"model.{name} must be a finite number > 0, got {value!r}.")
    if not (math.isfinite(config.init_method_std) and config.init_method_std >= 0):
        raise ConfigError(f"model.init_method_std must be a finite number >= 0, got {config.init_method_std!r}.")
    for name in ("attention_dropout", "hidden_dropout"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"model.{name} must be in [0, 1), got {value!r}; 0 is no dropout.")
