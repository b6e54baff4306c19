"""The rules that a model's sizes and options keep together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onstep.config.model_config import ModelConfig
from onstep.config.part import nearest
from onstep.errors import ConfigError

_STRETCHES = ("factor", "original_max_position_embeddings")
_ROPE_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (_STRETCHES, ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "llama3": ((*_STRETCHES, "low_freq_factor", "high_freq_factor"), ()),
}
"""Of each `rope_type` the numbers that it takes and those that it may have."""


def check_model(model: ModelConfig) -> None:
    """Check sizes and options against each other.

    Raises:
        ConfigError: the first rule that is broken, with the values and what to change.
    """
    _check_heads(model)
    _check_positions(model)


def _check_heads(model: ModelConfig) -> None:
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.kv_channels is None and model.hidden_size % heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} must be a multiple of num_attention_heads={heads}; "
            "change one of them, or set model.kv_channels (the width of a head)."
        )
    if groups is not None and heads % groups:
        raise ConfigError(
            f"model.num_attention_heads={heads} must be a multiple of num_query_groups={groups}; "
            "each key/value head serves the same number of query heads."
        )


def _check_positions(model: ModelConfig) -> None:
    kind, scaling = model.position_embedding_type, model.rope_scaling
    if kind != "rope":
        if scaling:
            raise ConfigError(
                f"model.rope_scaling={scaling} stretches rotary positions, but model.position_embedding_type={kind} "
                "has none; set rope_scaling to null, or position_embedding_type to rope."
            )
        return
    width = model.kv_channels or model.hidden_size // model.num_attention_heads
    if width % 2:
        raise ConfigError(
            f"a head of the model is {width} wide, and rotary embeddings take an even width "
            f"(hidden_size={model.hidden_size}, num_attention_heads={model.num_attention_heads}, "
            f"kv_channels={model.kv_channels}); change the number of heads, set an even model.kv_channels, or another "
            "position_embedding_type."
        )
    if scaling is not None:
        _check_rope_scaling(scaling, width)


def _check_rope_scaling(scaling: Mapping[str, Any], width: int) -> None:
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in _ROPE_NUMBERS:
        hint = nearest(kind, list(_ROPE_NUMBERS)) if isinstance(kind, str) else ""
        raise ConfigError(
            f"model.rope_scaling has rope_type {kind!r}, which must be {' | '.join(_ROPE_NUMBERS)}.{hint}"
        )
    _check_rope_keys(scaling, str(kind))
    for name, value in scaling.items():
        if name not in ("rope_type", "type", "truncate") and value is not None:
            _check_rope_number(name, value)
    if kind == "dynamic" and width < 4:
        raise ConfigError(
            f"model.rope_scaling of type dynamic takes heads at least 4 wide, got {width}; use linear, or wider heads."
        )
    _check_rope_bounds(scaling, str(kind))


def _check_rope_keys(scaling: Mapping[str, Any], kind: str) -> None:
    required, optional = _ROPE_NUMBERS[kind]
    for name in scaling:
        if name == "rope_theta":
            raise ConfigError(f"model.rope_scaling has rope_theta={scaling[name]}; set model.rotary_base instead.")
        if name not in ("rope_type", "type", *required, *optional):
            hint = nearest(name, [*required, *optional])
            known = ", ".join((*required, *optional)) or "no numbers"
            raise ConfigError(f"model.rope_scaling has {name!r}, but rope_type {kind} takes {known}.{hint}")
    missing = [name for name in required if scaling.get(name) is None]
    if missing:
        raise ConfigError(
            f"model.rope_scaling={dict(scaling)} lacks {', '.join(missing)}; rope_type {kind} takes "
            f"{', '.join(required)}."
        )


def _check_rope_number(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    least = 1.0 if name == "factor" else 0.0
    if is_number and (value >= least if name == "factor" else value > least):
        return
    rule = "a number >= 1 (how many times longer the sequences are)" if name == "factor" else "a finite number > 0"
    raise ConfigError(f"model.rope_scaling.{name} must be {rule}, got {value!r}.")


def _check_rope_bounds(scaling: Mapping[str, Any], kind: str) -> None:
    bounds = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}.get(kind)
    if bounds is None:
        return
    low, high = (scaling.get(name) for name in bounds)
    low, high = 1.0 if low is None else low, 32.0 if high is None else high
    if low >= high:
        raise ConfigError(
            f"model.rope_scaling.{bounds[0]}={low} must be below {bounds[1]}={high}; between the two the frequencies "
            "are blended."
        )
