"""What a conversion must know of one of `transformers`' architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError

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
"""`transformers`' activation functions by ours."""


@dataclass(frozen=True)
class Architecture:
    """One architecture of `transformers`, as functions of our configuration and of its files.

    Weights go by name: ours are those of `Transformer.state_dict()`, `transformers`' those of its safetensors files.
    """

    model_type: str
    """Its name in `config.json`."""
    class_name: str
    """The class with a language-model head."""
    obstacles: Callable[[ModelConfig], list[str]]
    """What of a configuration this architecture does not have, in words; empty where it can hold the model."""
    describe: Callable[[ModelConfig], dict[str, Any]]
    """Sizes and options in `config.json`'s names, without those that all architectures share."""
    read: Callable[[Mapping[str, Any]], ModelConfig]
    """The configuration that a `config.json` describes.

    Raises:
        ConfigError: a feature that `Transformer` does not have.
    """
    to_hf: Callable[[ModelConfig, Weights], dict[str, Tensor]]
    """Our weights (all of them, or some) in `transformers`' names and shapes."""
    from_hf: Callable[[ModelConfig, Weights], dict[str, Tensor]]
    """`transformers`' weights in our names and shapes; those that it gave and no others."""
    clean: Callable[[Weights], dict[str, Tensor]]
    """The weights of a file without buffers that are not weights, in the names that `to_hf` gives."""
    embedding: str
    """`transformers`' name of the embedding matrix."""
    output: str
    """`transformers`' name of the output matrix."""


def differing(config: ModelConfig, **expected: Any) -> list[str]:
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


def our_activation(name: Any) -> str:
    """Our name of an activation function.

    Raises:
        ConfigError: one that `Transformer` does not have.
    """
    if name not in HF_ACTIVATIONS:
        raise ConfigError(
            f"config.json has the activation function {name!r}, which Onstep's Transformer does not have; "
            f"convert a model with one of {', '.join(HF_ACTIVATIONS)}."
        )
    return HF_ACTIVATIONS[name]
