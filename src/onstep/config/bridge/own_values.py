"""Megatron Bridge's values of keys that are Onstep's, too: other spellings of the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onstep.config.bridge.precision import precision_of
from onstep.config.bridge.values import comparable, function_name, plain
from onstep.config.named_functions import named_function
from onstep.config.suggestions import shown
from onstep.errors import ConfigError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "fast_gelu": "gelu_tanh",
    "openai_gelu": "gelu_tanh",
    "relu": "relu",
    "squared_relu": "relu2",
}
"""Names of functions, and the activations that they are."""
FUNCTIONS = ("torch.", "megatron.")
"""How a text begins that names a function, not an activation."""

_TOKENIZERS = {"HuggingFaceTokenizer": "huggingface"}
_OTHER_TOKENIZERS = ("SentencePiece", "GPT2BPE", "GPTSentencePiece", "BertWordPiece", "Llama2", "TikTokenizer")
NULL_TOKENIZER = "NullTokenizer"
"""Bridge's tokenizer of data that has token ids already."""

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What `rope_scaling=True` is there."""
_PROJECTIONS = {
    "linear_qkv": ["query", "key", "value"],
    "linear_proj": ["output"],
    "linear_fc1": ["gate", "up"],
    "linear_fc2": ["down"],
}
"""The matrices of Megatron's layers, which are several here."""


def _activation(section: Any, value: Any) -> Any:
    name = function_name(value)
    if name is None or (isinstance(value, str) and not value.startswith(FUNCTIONS)):
        return value
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"model.activation_func={name} is not supported; set silu, gelu, gelu_tanh, relu or relu2 (squared)."
        )
    return ACTIVATIONS[name]


def _tokenizer(section: Any, value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_OTHER_TOKENIZERS):
        raise ConfigError(
            f"tokenizer.tokenizer_type={shown(value)}: Megatron's tokenizers of this kind are not supported; convert "
            f"it to a tokenizer.json, and set tokenizer.tokenizer_type=tokenizers."
        )
    return _TOKENIZERS.get(value, value) if isinstance(value, str) else value


def _rope_scaling(section: Any, value: Any) -> Any:
    if value is True:
        return {**LLAMA3, "factor": float(section.given_of_bridge.get("rope_scaling_factor", LLAMA3["factor"]))}
    return None if value is False else value


def _targets(section: Any, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return value
    return [name for one in value for name in _projections(one)]


def _projections(name: Any) -> list[Any]:
    return _PROJECTIONS.get(name, [name]) if isinstance(name, str) else [name]


def _dtype(section: Any, value: Any) -> Any:
    """A type of torch by its name."""
    name = comparable(value)
    return name.removeprefix("torch.") if isinstance(name, str) else name


def _truth(section: Any, value: Any) -> Any:
    """A number in place of a truth value, as Bridge's recipes have it."""
    return bool(value) if isinstance(value, int) and 0 <= value < 2**31 else value


def _blocks(section: Any, value: Any) -> Any:
    """Classes by their names, and a function that finds the blocks of a model by its own."""
    if isinstance(value, list | tuple):
        return [one.__name__ if isinstance(one, type) else one for one in value]
    if isinstance(value, type):
        return [value.__name__]
    return [named_function(value)] if callable(value) else value


VALUES: dict[tuple[str, str], Callable[[Any, Any], Any]] = {
    ("TrainingConfig", "manual_gc_eval"): _truth,
    ("ModelConfig", "activation_func"): _activation,
    ("ModelConfig", "rope_scaling"): _rope_scaling,
    ("OptimizerConfig", "optimizer"): lambda section, value: "muon" if value == "dist_muon" else value,
    ("OptimizerConfig", "params_dtype"): _dtype,
    ("OptimizerConfig", "main_params_dtype"): _dtype,
    ("OptimizerConfig", "exp_avg_dtype"): _dtype,
    ("OptimizerConfig", "exp_avg_sq_dtype"): _dtype,
    ("FullyShardedConfig", "wrap"): _blocks,
    ("TokenizerConfig", "tokenizer_type"): _tokenizer,
    ("PeftConfig", "target_modules"): _targets,
    ("ConfigContainer", "mixed_precision"): lambda section, value: precision_of(value),
}
"""By section class and field."""


def own_value(section: Any, name: str, value: Any) -> Any:
    """A value of a field, as Onstep spells it.

    Raises:
        ConfigError: for a value of Bridge that is not supported, by what it is.
    """
    known = VALUES.get((type(section).__name__, name))
    if known is None:
        return plain(value) if isinstance(value, Mapping | list | tuple) else value
    return known(section, plain(value))
