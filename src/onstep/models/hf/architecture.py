"""Describes a `transformers` architecture for conversion, and provides the checks shared by all conversions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models.hf.values import short
from onstep.models.sizes import ffn_hidden_size, head_width, num_query_groups

Weights = Mapping[str, Tensor]


class UnsupportedModelError(ConfigError):
    """A model of `transformers` that Onstep's `Transformer` does not compute."""


HF_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""`transformers`' names of each of our activation functions; the first is the one written."""

SHARED_KEYS = {
    "vocab_size": "vocab_size",
    "initializer_range": "init_method_std",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
}
"""Keys common to every `config.json`, with the corresponding options of `ModelConfig`."""


@dataclass(frozen=True)
class Architecture:
    """One architecture of `transformers`: tables read in both directions, and functions for what tables cannot express.

    Weights are identified by name: ours as in `Transformer.state_dict()`, theirs as in the safetensors files.
    """

    model_type: str
    """Name of the architecture in `config.json`."""
    class_name: str
    """Name of the class with a language-model head."""
    options: Mapping[str, Any]
    """The options of `ModelConfig` shared by all models of this architecture."""
    keys: Mapping[str, str]
    """Additional keys of its `config.json`, with the corresponding options of `ModelConfig`."""
    defaults: Mapping[str, Any]
    """`transformers`' defaults for keys missing from a `config.json`."""
    modules: Mapping[str, str]
    """`transformers`' names for our modules, with `{}` for each number."""
    obstacles: Callable[[ModelConfig], list[str]]
    """Features of a configuration that the architecture lacks, in words; empty if it can represent the model."""
    describe: Callable[[ModelConfig], dict[str, Any]]
    """Entries of `config.json` other than `keys`."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Model options that a `config.json` (with defaults) describes, other than `keys`.

    Raises:
        ConfigError: for a missing size, or a feature that `Transformer` does not support.
    """
    split: Callable[[Weights], dict[str, Tensor]]
    """Converts our weights (all or some) to `transformers`' shapes, under names that `modules` knows."""
    join: Callable[[Weights], dict[str, Tensor]]
    """The inverse of `split`."""
    clean: Callable[[Weights], dict[str, Tensor]]
    """The weights of a file under the names of `to_hf`, without buffers that are not weights."""

    def to_hf(self, weights: Weights) -> dict[str, Tensor]:
        """Convert our weights to `transformers`' names and shapes."""
        return {_renamed(name, self.modules): tensor for name, tensor in self.split(weights).items()}

    def from_hf(self, weights: Weights) -> dict[str, Tensor]:
        """Convert `transformers`' weights to our names and shapes; only the weights that are given."""
        ours = {theirs: name for name, theirs in self.modules.items()}
        return self.join({_renamed(name, ours): tensor for name, tensor in weights.items()})


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    *module, kind = name.split(".")
    pattern = ".".join("{}" if part.isdigit() else part for part in module)
    return f"{modules[pattern].format(*filter(str.isdigit, module))}.{kind}"


def described(config: ModelConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    """The entries of `config.json` for `keys`."""
    resolved = {
        "ffn_hidden_size": ffn_hidden_size(config),
        "num_query_groups": num_query_groups(config),
        "kv_channels": head_width(config),
        "activation_func": next(name for name, ours in HF_ACTIVATIONS.items() if ours == config.activation_func),
    }
    return {theirs: resolved.get(ours, getattr(config, ours)) for theirs, ours in keys.items()}


def differing(config: ModelConfig, expected: Mapping[str, Any]) -> list[str]:
    """The options of `config` that differ from the expected ones, as `name=value`."""
    found = {name: getattr(config, name) for name in expected}
    return [f"{name}={value!r}" for name, value in found.items() if value != expected[name]]


def check_features(features: Mapping[str, tuple[Any, Any]], remedy: str) -> None:
    """Refuse settings that `Transformer` would compute differently.

    Args:
        features: for each setting that affects the computation, the file's value and the only convertible one.
        remedy: which models can be converted.

    Raises:
        ConfigError: listing all settings that differ.
    """
    found = [f"{name} = {short(value)}" for name, (value, ours) in features.items() if value != ours]
    if found:
        raise UnsupportedModelError(
            f"config.json uses features that Onstep's Transformer lacks: {', '.join(found)}; convert a model {remedy}."
        )


def check_complete(hf_config: Mapping[str, Any], required: tuple[str, ...]) -> None:
    """Refuse a `config.json` that lacks a required size.

    Raises:
        ConfigError: naming what is missing.
    """
    missing = [name for name in required if hf_config.get(name) is None]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)}; a model requires {', '.join(required)}.")
