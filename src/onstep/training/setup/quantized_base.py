"""Builds a model whose layers are frozen in 4 or 8 bits, reading the weights of one layer at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from onstep.checkpoint import CheckpointInfo
from onstep.checkpoint.loading import read_outline, stored_states
from onstep.config import ConfigContainer, from_dict
from onstep.errors import CheckpointError
from onstep.models import Transformer
from onstep.models.hf.any_directory import LanguageModel, empty_model
from onstep.models.hf.by_layer import hf_weights_by_layer, layer_of
from onstep.models.hf.family_directory import load_causal_lm
from onstep.models.quantized_layers import prepare, quantization_config, quantized_linear
from onstep.training.setup.lora import merged_state_dict, projections
from onstep.training.setup.weight_types import frozen_type, type_at_first

_CPU = torch.device("cpu")


def quantized_model(
    config: ConfigContainer,
    layers: Iterable[Mapping[str, Tensor]] | None = None,
    where: str = "",
    device: torch.device = _CPU,
) -> LanguageModel:
    """A model with the projections of its layers as `peft.base_quantization` says.

    No more than the weights of one layer are in floating point at any time.

    Args:
        layers: the weights, in parts; None if they will be loaded from a checkpoint of the run: they are 0 until then.
        where: what holds the weights, for messages.
        device: where weights are quantized and stay; the others are on the CPU.

    Raises:
        CheckpointError: if they are not those of the model.
        MissingExtraError: if `bitsandbytes` is not installed.
    """
    is_own = config.model.hf_config is None
    with torch.device("meta") if is_own else nullcontext():  # that of transformers has buffers with values
        model = empty_model(config.model, type_at_first(config)) if not is_own else Transformer(config.model)
    names, missing = projections(model), dict(model.state_dict())
    layers = _zeros(dict(missing)) if layers is None else layers
    for name in names:
        _put(model, name, nn.Identity())
    if is_own:
        model = model.to(type_at_first(config)).to_empty(device="cpu")
    own, kind, dtype = model.state_dict(), config.peft.base_quantization, _computed(config)
    assert kind is not None
    for weights in layers:
        for name, tensor in weights.items():
            expected = missing.pop(name, None)
            if expected is None or (expected.shape, expected.is_floating_point()) != (
                tensor.shape,
                tensor.is_floating_point(),
            ):
                problem = "which the model does not have" if expected is None else f"not {tuple(expected.shape)} floats"
                raise CheckpointError(
                    f"{where} has {name} of shape {tuple(tensor.shape)} and type {tensor.dtype}, {problem}; use the "
                    f"model section of the configuration that it was saved with."
                )
            module, _, part = name.rpartition(".")
            if module not in names:
                own[name].copy_(tensor)
            elif part == "weight":
                bias = weights.get(f"{module}.bias")
                _put(model, module, quantized_linear(tensor.float(), bias, kind, dtype, device))
    if missing:
        raise CheckpointError(f"{where} lacks {next(iter(missing))} and {len(missing) - 1} more weights of the model.")
    return _for_peft(model, kind)


def quantized_directory(directory: Path, config: ConfigContainer, device: torch.device = _CPU) -> LanguageModel:
    """The model of `quantized_model` with the weights of a Hugging Face directory. Raises like `load_directory`."""
    if config.model.hf_config is None:
        return quantized_model(config, hf_weights_by_layer(directory, config.model), str(directory), device)
    skeleton = empty_model(config.model, type_at_first(config))  # whose memory is never written
    names, kind, dtype = projections(skeleton), config.peft.base_quantization, _computed(config)
    assert kind is not None
    linear = {name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
    kept = [name.removeprefix("model.") for name in linear - set(names)]
    model = load_causal_lm(directory, config.model, dtype, quantization_config(kind, dtype, kept), device)
    for name in names:
        prepare(model.get_submodule(name), dtype)
    return _for_peft(model, kind)


def _computed(config: ConfigContainer) -> torch.dtype:
    """The type that quantized layers compute in."""
    return torch.float16 if config.mixed_precision == "fp16_mixed" else frozen_type(config)


def _for_peft(model: LanguageModel, kind: str) -> LanguageModel:
    setattr(model, f"is_loaded_in_{4 if kind == 'nf4' else 8}bit", True)  # where peft looks for it
    return model


def weights_by_layer(info: CheckpointInfo) -> Iterator[dict[str, Tensor]]:
    """The weights of a checkpoint in floating point, LoRA merged, one layer at a time.

    Raises:
        CheckpointError: if the checkpoint does not hold them as a single state.
    """
    states = [one for one in stored_states(info.manifest) if one.label == "model"]
    if len(states) != 1:
        raise CheckpointError(
            f"{info.path} does not hold the model as a single set of weights; load it in a run first."
        )
    outline, peft = read_outline(info, states[0]), from_dict(info.manifest.config).peft
    names: dict[str, list[str]] = {}
    for name in outline.state:
        names.setdefault(layer_of(name), []).append(name)
    for group in names.values():
        state = {name: outline.state[name] for name in group}
        read = {name: one if outline.stored(one) is None else outline.read(one) for name, one in state.items()}
        yield read if peft.peft_scheme is None else merged_state_dict(read, peft.alpha / peft.dim)


def _zeros(expected: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Weights of 0, one matrix with its bias at a time."""
    for name in expected:
        module, _, part = name.rpartition(".")
        if part != "bias" or f"{module}.weight" not in expected:
            ends = {name, f"{module}.bias"} & set(expected) if part == "weight" else {name}
            yield {one: torch.zeros(expected[one].shape, dtype=expected[one].dtype) for one in ends}


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
