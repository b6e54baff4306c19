"""The rules for the values in a `config.json`, which others have written: each that is read has a type and a range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from onstep.config.field_types import is_integer_from, is_number
from onstep.errors import ConfigError

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
"""Ten times the depth of any model known."""
MAX_EXPERTS = 65_536
_SHOWN = 80
"""Maximum number of characters of a value in a message."""


class _Rule(NamedTuple):
    words: str
    accepts: Callable[[Any], bool]


def _is_list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_SIZE = _Rule(f"an integer from 1 to {MAX_SIZE}", lambda value: is_integer_from(value, 1) and value <= MAX_SIZE)
_EXPERTS = _Rule(
    f"an integer from 0 to {MAX_EXPERTS}", lambda value: is_integer_from(value, 0) and value <= MAX_EXPERTS
)
_DEPTH = _Rule(f"an integer from 1 to {MAX_LAYERS}", lambda value: is_integer_from(value, 1) and value <= MAX_LAYERS)
_FLAG = _Rule("true or false", lambda value: value in (True, False))
_RATE = _Rule("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
_POSITIVE = _Rule("a finite number > 0", lambda value: _is_finite(value) and value > 0)
_NOT_NEGATIVE = _Rule("a finite number >= 0", lambda value: _is_finite(value) and value >= 0)
_TEXT = _Rule("a string", _is_text)
_TEXTS = _Rule("a list of strings", _is_list_of(_is_text))
_LAYERS = _Rule("a list of the numbers of layers", _is_list_of(lambda value: is_integer_from(value, 0)))
_OBJECT = _Rule("an object", lambda value: isinstance(value, dict))

_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "original_max_position_embeddings"), _SIZE),
    **dict.fromkeys(("n_embd", "n_inner", "n_head", "n_positions"), _SIZE),
    "moe_intermediate_size": _SIZE,
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), _EXPERTS),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), _DEPTH),
    **dict.fromkeys(("hidden_act", "activation_function"), _TEXT),
    **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), _RATE),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "initializer_range"), _NOT_NEGATIVE),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob"), _FLAG),
    **dict.fromkeys(("use_sliding_window", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"), _FLAG),
    "add_cross_attention": _FLAG,
    **dict.fromkeys(("rope_theta", "partial_rotary_factor"), _POSITIVE),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _OBJECT),
    "layer_types": _TEXTS,
    "mlp_only_layers": _LAYERS,
    "decoder_sparse_step": _Rule("an integer", lambda value: is_integer_from(value, -MAX_SIZE)),
}
"""Of all architectures together. A value that is null has the default, or is refused where there is none."""


def check_types(hf_config: Mapping[str, Any], keys: tuple[str, ...] | None = None) -> None:
    """Check the types and ranges of the values in a `config.json` or in one of its objects.

    Args:
        keys: the keys to check; None checks all that are known.

    Raises:
        ConfigError: for the first value that breaks its rule.
    """
    for name in _RULES if keys is None else keys:
        value = hf_config.get(name)
        if value is not None and not _RULES[name].accepts(value):
            raise ConfigError(
                f"config.json has {name} = {short(value)}, which must be {_RULES[name].words}; correct it, or copy the "
                "directory again."
            )


def short(value: Any) -> str:
    """`repr(value)`, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
