"""A configuration and the model of trained weights: what is filled in, and what must agree."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from onstep.config import ConfigContainer
from onstep.config.derived import fill
from onstep.config.keys import typed_copy
from onstep.config.parts import ModelConfig, TokenizerConfig
from onstep.errors import ConfigError

logger = logging.getLogger(__name__)

OF_TRAINING = frozenset(
    {
        "seq_length",
        "make_vocab_size_divisible_by",
        "init_method_std",
        "attention_dropout",
        "hidden_dropout",
        "recompute_granularity",
        "log_max_attention_logit",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
        "moe_grouped_gemm",
        "moe_per_layer_logging",
        "mtp_loss_scaling_factor",
    }
)
"""What a run may choose for itself: how a model is trained, not which one it is."""


def fill_model(
    config: ConfigContainer, model: ModelConfig, tokenizer: TokenizerConfig | None, where: str
) -> ConfigContainer:
    """A copy of `config` with the model of trained weights, and their tokenizer where it names none of its own.

    Args:
        config: its values of the model hold where they are not the defaults, and must then be the weights'.
        model: what the weights are of.
        tokenizer: what their tokens mean, if that is known.
        where: the weights, for messages.

    Raises:
        ConfigError: naming the first value that is another one than the weights'.
    """
    config = typed_copy(config)
    _check_positions(config, model, where)
    theirs, default = _filled(config, model), ModelConfig()
    ours = _filled(config, config.model)
    taken = []
    for name in (field.name for field in fields(ModelConfig) if field.name not in OF_TRAINING):
        own, of_weights = getattr(config.model, name), getattr(theirs, name)
        if _same(getattr(ours, name), of_weights) and own != getattr(default, name):
            continue
        if own != getattr(default, name):
            raise ConfigError(
                f"model.{name}={own} is not that of the weights in {where}, which is {of_weights}; leave it out, or "
                f"set it to its default, to take theirs."
            )
        if own != of_weights:
            setattr(config.model, name, of_weights)
            taken.append(f"{name}={of_weights}")
    is_theirs = tokenizer is not None and config.tokenizer == TokenizerConfig()
    if is_theirs and tokenizer is not None:
        config.tokenizer = tokenizer
    logger.info("tokenizer: %s, %s", _named(config.tokenizer), _where_from(is_theirs, tokenizer, where))
    if taken:
        logger.info("model taken from %s: %s", where, ", ".join(taken))
    return config


def _named(tokenizer: TokenizerConfig) -> str:
    path = tokenizer.tokenizer_model
    return tokenizer.tokenizer_type if path is None else f"{tokenizer.tokenizer_type} {path}"


def _where_from(is_theirs: bool, theirs: TokenizerConfig | None, where: str) -> str:
    if is_theirs:
        return f"that of the weights in {where}"
    if theirs is None:
        return f"as configured; there is none with the weights in {where}"
    return f"as configured, not that of the weights in {where} ({_named(theirs)})"


def _filled(config: ConfigContainer, model: ModelConfig) -> ModelConfig:
    """`model` with its derived sizes."""
    whole = typed_copy(config)
    whole.model = model
    return fill(whole, 1).model


def _same(own: Any, theirs: Any) -> bool:
    if isinstance(own, float) and isinstance(theirs, float):
        return abs(own - theirs) <= 1e-9 * max(abs(own), abs(theirs))  # written in another precision
    return bool(own == theirs)


def _check_positions(config: ConfigContainer, model: ModelConfig, where: str) -> None:
    """A learned table of positions has one length."""
    if model.position_embedding_type == "learned_absolute" and config.model.seq_length != model.seq_length:
        raise ConfigError(
            f"model.seq_length={config.model.seq_length} must be {model.seq_length}: the weights in {where} have that "
            f"many learned positions; set model.seq_length and dataset.seq_length."
        )
