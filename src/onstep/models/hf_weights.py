"""Weights to and from the names and shapes of `transformers` (no `transformers` needed)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError, OnstepError
from onstep.models.hf_architecture import Architecture
from onstep.models.hf_architectures import architecture_of
from onstep.models.layer_types import replicated_layers
from onstep.models.transformer import Transformer, empty_transformer

_SHOWN = 5
"""Names listed in an error."""


def to_hf_state_dict(model: Transformer) -> dict[str, Tensor]:
    """The weights under `transformers`' names; tied ones once, as the embedding.

    They share memory with the model where `transformers` stores them alike.

    Raises:
        ConfigError: a model that no architecture of `transformers` computes, or one with a value head.
    """
    architecture = architecture_of(model.config)
    check_heads(model, architecture.class_name)
    return architecture.to_hf(model.config, model.state_dict())


def hf_obstacle(model: Transformer) -> str | None:
    """Why `transformers` cannot open `model`, with what to do instead; None where it can."""
    try:
        check_heads(model, architecture_of(model.config).class_name)
    except ConfigError as error:
        return str(error)
    return None


def check_heads(model: nn.Module, class_name: str) -> None:
    """Refuse a model with a layer that a language model of `transformers` has no name for.

    Raises:
        ConfigError: naming the layer.
    """
    for name, layer in replicated_layers(model).items():
        raise ConfigError(
            f"the model's {name!r} is a value head ({type(layer).__name__}), for which transformers' {class_name} has "
            f"no name; keep the model in Onstep's checkpoints, or give it its language-model head back."
        )


def from_hf_state_dict(config: ModelConfig, state: Mapping[str, Tensor]) -> Transformer:
    """A model of `config` with the weights of a `transformers` model, copied into float32 on the CPU.

    A tied model's output matrix may be absent, or equal to the embedding.

    Raises:
        ConfigError: a configuration that cannot be built, or that no architecture of `transformers` has.
        OnstepError: missing, unknown or misshaped weights.
    """
    model = empty_transformer(config)
    architecture = architecture_of(config)
    own = model.state_dict()
    expected = architecture.to_hf(config, {name: tensor.to("meta") for name, tensor in own.items()})
    given = architecture.clean(state)
    if model.output is None:
        given = _without_tied_output(given, architecture)
    _check_weights(expected, given)
    with torch.no_grad():
        for name, tensor in architecture.from_hf(config, given).items():
            own[name].copy_(tensor)
    return model


def _without_tied_output(given: dict[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    embedding, output = given.get(architecture.embedding), given.get(architecture.output)
    if embedding is not None and output is not None and not torch.equal(embedding, output):
        raise OnstepError(
            f"the weights hold an {architecture.output} that differs from {architecture.embedding}, but the "
            "configuration ties them; set tie_word_embeddings (share_embeddings_and_output_weights) to false."
        )
    return {name: tensor for name, tensor in given.items() if name != architecture.output}


def _check_weights(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    misshaped = [
        f"{name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    ]
    problems = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
    found = [f"{len(names)} {kind} ({_first(names)})" for kind, names in problems.items() if names]
    if found:
        raise OnstepError(
            f"the weights do not fit the model's configuration: {'; '.join(found)}. "
            "Use the configuration that the weights were saved with."
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
