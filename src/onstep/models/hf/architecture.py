"""What a conversion must know of one of `transformers`' architectures, and the checks that all conversions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError
from onstep.models.sizes import ffn_hidden_size, head_width, num_query_groups

Weights = Mapping[str, Tensor]

HF_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""`transformers`' activation functions by ours; the first name of each is the one that is written."""

SHARED_KEYS = {
    "vocab_size": "vocab_size",
    "initializer_range": "init_method_std",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
}
"""Keys of every `config.json`, and the options of `ModelConfig` that they hold."""


@dataclass(frozen=True)
class Architecture:
    """One architecture of `transformers`, as tables that are read in both directions and what no table can say.

    Weights go by name: ours are those of `Transformer.state_dict()`, `transformers`' those of its safetensors files.
    """

    model_type: str
    """Its name in `config.json`."""
    class_name: str
    """The class with a language-model head."""
    options: Mapping[str, Any]
    """The options of `ModelConfig` that all of its models have alike."""
    keys: Mapping[str, str]
    """Further keys of its `config.json`, and the options of `ModelConfig` that they hold."""
    defaults: Mapping[str, Any]
    """What `transformers` takes for keys that a `config.json` leaves out."""
    modules: Mapping[str, str]
    """`transformers`' names of our modules, `{}` for each number."""
    obstacles: Callable[[ModelConfig], list[str]]
    """What of a configuration it does not have, in words; empty where it can hold the model."""
    describe: Callable[[ModelConfig], dict[str, Any]]
    """What `config.json` says beside `keys`."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Options of the model that a `config.json` (with the defaults) describes, beside `keys`.

    Raises:
        ConfigError: a missing size, or a feature that `Transformer` does not have.
    """
    split: Callable[[Weights], dict[str, Tensor]]
    """Our weights (all of them, or some) in `transformers`' shapes, under names that `modules` has."""
    join: Callable[[Weights], dict[str, Tensor]]
    """The way back from `split`."""
    clean: Callable[[Weights], dict[str, Tensor]]
    """The weights of a file without buffers that are not weights, in the names that `to_hf` gives."""

    def to_hf(self, weights: Weights) -> dict[str, Tensor]:
        """Our weights in `transformers`' names and shapes."""
        return {_renamed(name, self.modules): tensor for name, tensor in self.split(weights).items()}

    def from_hf(self, weights: Weights) -> dict[str, Tensor]:
        """`transformers`' weights in our names and shapes; those that it gave and no others."""
        ours = {theirs: name for name, theirs in self.modules.items()}
        return self.join({_renamed(name, ours): tensor for name, tensor in weights.items()})


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    *module, kind = name.split(".")
    pattern = ".".join("{}" if part.isdigit() else part for part in module)
    return f"{modules[pattern].format(*filter(str.isdigit, module))}.{kind}"


def described(config: ModelConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    """What `config.json` says under `keys`."""
    resolved = {
        "ffn_hidden_size": ffn_hidden_size(config),
        "num_query_groups": num_query_groups(config),
        "kv_channels": head_width(config),
        "activation_func": next(name for name, ours in HF_ACTIVATIONS.items() if ours == config.activation_func),
    }
    return {theirs: resolved.get(ours, getattr(config, ours)) for theirs, ours in keys.items()}


def differing(config: ModelConfig, expected: Mapping[str, Any]) -> list[str]:
    """The options of `config` that are not as expected, as `name=value`."""
    found = {name: getattr(config, name) for name in expected}
    return [f"{name}={value!r}" for name, value in found.items() if value != expected[name]]


def check_features(features: Mapping[str, tuple[Any, Any]], remedy: str) -> None:
    """Refuse by name what `Transformer` would compute differently.

    Args:
        features: of each setting that changes the computation the file's value and the only one that can be converted.
        remedy: what models can be converted.

    Raises:
        ConfigError: listing all settings that differ.
    """
    found = [f"{name} = {value!r}" for name, (value, ours) in features.items() if value != ours]
    if found:
        raise ConfigError(
            f"config.json uses what Onstep's Transformer does not have: {', '.join(found)}; convert a model {remedy}."
        )


def check_complete(hf_config: Mapping[str, Any], required: tuple[str, ...]) -> None:
    """Refuse a `config.json` that leaves out a size.

    Raises:
        ConfigError: naming what is missing.
    """
    missing = [name for name in required if hf_config.get(name) is None]
    if missing:
        raise ConfigError(f"config.json has no {', '.join(missing)}; a model needs {', '.join(required)}.")
