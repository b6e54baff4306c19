"""Builds the models of checkpoints, with their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from onstep.checkpoint import CheckpointInfo, resolve
from onstep.checkpoint.loading import open_weights, read_weights
from onstep.checkpoint.states import mismatches
from onstep.config import ModelConfig, from_dict
from onstep.config.checks.single_values import check_values
from onstep.errors import CheckpointError, ConfigError
from onstep.metrics.model_shape import ModelShape, num_parameters
from onstep.models.deferred import deferred
from onstep.models.hf.any_directory import LanguageModel, empty_model, fill_deferred
from onstep.models.transformer import empty_transformer
from onstep.training.setup.lora import merged_state_dict
from onstep.training.setup.weight_types import common_type

SMALL = 10_000_000
"""A model of so many parameters is built even if its weights are fewer: comparing the two names what differs."""


def model_of_checkpoint(path: Path) -> LanguageModel:
    """The model of a checkpoint, or of a run's newest one: on the CPU, with LoRA merged.

    Its weights have the type that they were saved in; if there are several, the one that holds them all.

    Raises:
        CheckpointError: if no complete one exists, or it does not hold the model of its configuration.
    """
    info = resolve(path)
    if not info.manifest.config:
        raise CheckpointError(f"{info.path} has no configuration, so its model is unknown.")
    return model_of(info, from_dict(info.manifest.config).model)


def model_of(info: CheckpointInfo, config: ModelConfig, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model of `config` with the weights of a checkpoint, LoRA merged. Raises like `model_of_checkpoint`.

    Args:
        dtype: the type of its weights; None is the one that holds those of the checkpoint exactly.
    """
    tensors, tied = read_weights(info)
    state = merged_weights(info, {**tensors, **{name: tensors[kept] for name, kept in tied.items()}})
    model = _empty(info, config, state, dtype)
    model.load_state_dict(state)
    return model


def deferred_model_of(info: CheckpointInfo, config: ModelConfig, dtype: torch.dtype | None = None) -> LanguageModel:
    """The same, for a caller that writes it: each of its tensors is read when its values are asked for."""
    state = deferred_weights(info)
    model = _empty(info, config, state, dtype, device="meta")
    fill_deferred(model, in_types_of(model, state))
    return model


def in_types_of(model: LanguageModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in the types that a model has for them."""
    kinds = {name: one.dtype for name, one in model.state_dict().items()}
    return {name: one.to(kinds[name]) for name, one in state.items()}


def deferred_weights(info: CheckpointInfo) -> dict[str, Tensor]:
    """The weights of a checkpoint, LoRA merged, by all their names; each is read when its values are asked for.

    Raises:
        CheckpointError: if the checkpoint does not hold the weights as a single state, or its files are damaged.
    """
    weights = open_weights(info)
    tensors = {name: deferred(one.shape, one.dtype, one.read) for name, one in weights.tensors.items()}
    return merged_weights(info, {**tensors, **{name: tensors[kept] for name, kept in weights.tied.items()}})


def merged_weights(info: CheckpointInfo, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint with LoRA merged into them, if it has any."""
    if not info.manifest.config:
        return state
    peft = from_dict(info.manifest.config).peft
    return state if peft.peft_scheme is None else merged_state_dict(state, peft.alpha / peft.dim)


def cast_deferred(model: LanguageModel, dtype: torch.dtype) -> None:
    """Convert the deferred weights of a model that are numbers to a type."""
    state = model.state_dict()
    fill_deferred(model, {name: one.to(dtype) if one.is_floating_point() else one for name, one in state.items()})


def _empty(
    info: CheckpointInfo,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    device: str = "cpu",
) -> LanguageModel:
    """The model that the weights of a checkpoint fit, to be filled with them."""
    try:
        model = empty_for(config, state, dtype, device)
    except ConfigError as error:
        raise CheckpointError(f"{info.path} does not hold the weights of this run's model: {error}") from error
    expected = {
        name: torch.empty_like(one, dtype=state[name].dtype if name in state else one.dtype, device="meta")
        for name, one in model.state_dict().items()
    }
    problems = mismatches(expected, state)
    if problems:
        raise CheckpointError(
            f"{info.path} does not hold the weights of this run's model: {'; '.join(problems)}. Use the "
            f"model section of the configuration that saved it."
        )
    return model


def empty_for(
    config: ModelConfig, state: Mapping[str, Tensor], dtype: torch.dtype | None = None, device: str = "cpu"
) -> LanguageModel:
    """A model whose weights are to be filled with those of a checkpoint.

    Args:
        dtype: the type of its weights; None is the one that holds those of the checkpoint exactly.
        device: where they are: `cpu` or `meta`.

    Raises:
        ConfigError: for invalid sizes, or a model that is larger than its weights; it is not built then.
    """
    dtype = dtype or common_type(state)
    if config.hf_config is not None:
        return empty_model(config, dtype, device)
    check_values(config, "model.")
    num_layers, shape = config.num_layers + (config.mtp_num_layers or 0), None
    num_weights = sum(tensor.numel() for tensor in state.values())
    if num_layers <= len(state):
        shape = ModelShape.of(config)
    if num_layers > len(state) or (shape is not None and num_parameters(shape) > 2 * num_weights + SMALL):
        raise ConfigError(
            f"model.num_layers={num_layers}, model.hidden_size={config.hidden_size} and model.vocab_size="
            f"{config.vocab_size} are the sizes of another model than that of {len(state)} tensors with "
            f"{num_weights:,} weights; restore the configuration."
        )
    return empty_transformer(config, dtype, device)
