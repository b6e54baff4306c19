"""Converts models to and from `transformers`: `config.json`, weights, and directories for `from_pretrained`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.config.field_types import accepts_none, field_types
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError, OnstepError
from onstep.models.deferred import value_of
from onstep.models.hf.architecture import HF_ACTIVATIONS, SHARED_KEYS, Architecture, UnsupportedModelError, described
from onstep.models.hf.gpt2 import GPT2
from onstep.models.hf.llama import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from onstep.models.hf.values import check_types, short
from onstep.models.hf.weight_files import (
    FLOATS,
    check_room,
    read_object,
    read_shapes,
    read_tensors,
    weight_files,
)
from onstep.models.sizes import check_model_config
from onstep.models.transformer import Transformer

ARCHITECTURES: tuple[Architecture, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT2)
"""Supported architectures, in the order in which they are tried for a configuration."""

_SHOWN = 5
"""Number of names listed in an error."""
_MAX_NAME = 200


def architecture_of(config: ModelConfig) -> Architecture:
    """The `transformers` architecture that computes the same as a model of `config`.

    Raises:
        ConfigError: if there is none; names the options that the closest one does not support.
    """
    has_experts = config.num_moe_experts is not None
    found = [(architecture.obstacles(config), architecture) for architecture in ARCHITECTURES]
    obstacles, nearest_one = min(found, key=lambda one: (len(one[0]), has_experts and one[1] is not QWEN3_MOE))
    if obstacles:
        raise ConfigError(
            f"no transformers architecture that Onstep can convert to computes this model; "
            f"{nearest_one.class_name} is the closest, but does not support {', '.join(obstacles)}. "
            f"Keep the model in Onstep checkpoints, or change its configuration so that transformers can open it."
        )
    return nearest_one


def hf_config_dict(config: ModelConfig, *, eos_id: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` from which `transformers` builds the same model.

    The result is a Llama, a Qwen2 (biases of q, k and v), a Qwen3 (norms of queries and keys) or a GPT-2 (LayerNorm,
    learned positions, no gate, biases). Its maximum sequence length is `seq_length`. If the architecture has no dropout
    on the residual stream, `hidden_dropout` is omitted; it only matters in training.

    Args:
        eos_id: token at which `transformers` ends generated text; None for none.
        dtype: dtype of the stored weights, in `transformers`' notation.

    Raises:
        ConfigError: for options or sizes that no architecture supports.
    """
    check_model_config(config)
    architecture = architecture_of(config)
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": dtype,
        **described(config, SHARED_KEYS),
        "bos_token_id": None,
        "eos_token_id": eos_id,
        **described(config, architecture.keys),
        **architecture.describe(config),
    }


def config_from_hf(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The configuration of the model that a `config.json` describes, for example a Llama, Qwen2, Qwen3 or GPT-2.

    `seq_length` is the model's maximum sequence length. Missing keys have `transformers`' defaults.

    Args:
        hf_config: the content of `config.json`.

    Raises:
        ConfigError: for another architecture, a missing size, or a feature that `Transformer` does not support.
    """
    model_type, known = hf_config.get("model_type"), {one.model_type: one for one in ARCHITECTURES}
    if not isinstance(model_type, str) or model_type not in known:
        hint = nearest(model_type, list(known)) if isinstance(model_type, str) else ""
        raise UnsupportedModelError(
            f"config.json has model_type {short(model_type)}; only {', '.join(known)} can be converted.{hint} To train "
            "another model, load it with transformers and pass it to onstep.Trainer."
        )
    check_types(hf_config)
    architecture = known[model_type]
    values = {**architecture.defaults, **hf_config}
    further = architecture.read(values)
    options: dict[str, Any] = {
        ours: values.get(theirs) for theirs, ours in {**SHARED_KEYS, **architecture.keys}.items()
    }
    if options["activation_func"] not in HF_ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json has the activation function {short(options['activation_func'])}, which Onstep's Transformer "
            f"does not support; convert a model with one of {', '.join(HF_ACTIVATIONS)}."
        )
    options["activation_func"] = HF_ACTIVATIONS[options["activation_func"]]
    options |= {**architecture.options, **further}
    _check_null(architecture, options)
    config = ModelConfig(**options)
    check_model_config(config)
    return config


def _check_null(architecture: Architecture, options: Mapping[str, Any]) -> None:
    theirs = {ours: name for name, ours in {**SHARED_KEYS, **architecture.keys}.items()}
    for name, type_ in field_types(ModelConfig).items():
        if options.get(name, ...) is None and not accepts_none(type_):
            raise ConfigError(
                f"in config.json, {theirs.get(name, name)} must have a value, got null; correct it, or leave it out."
            )


def from_hf_state_dict(config: ModelConfig, state: Mapping[str, Tensor]) -> Transformer:
    """A model of `config` with the weights of a `transformers` model, copied into float32 on the CPU.

    The output matrix of a tied model may be absent or equal to the embedding.

    Args:
        state: the weights by their names in `transformers`.

    Raises:
        ConfigError: for a configuration that cannot be built, or that no `transformers` architecture supports.
        OnstepError: for missing, unknown or misshaped weights.
    """
    return _filled(*_unfilled(config), state)


def deferred_from_hf(config: ModelConfig, state: Mapping[str, Tensor]) -> Transformer:
    """The same with deferred weights, in the type that holds them all. Raises like `from_hf_state_dict`."""
    model, expected = _unfilled(config)
    architecture = architecture_of(config)
    given = _untied(model, architecture, expected, state)
    dtype = next(iter(given.values())).dtype
    for tensor in given.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    ours = {name: tensor.to(dtype) for name, tensor in architecture.from_hf(given).items()}
    model.to(dtype).load_state_dict(ours, assign=True)
    return model


def _unfilled(config: ModelConfig) -> tuple[Transformer, dict[str, Tensor]]:
    """A model on the meta device, and its weights there under `transformers`' names and in their shapes."""
    with torch.device("meta"):
        model = Transformer(config)
    return model, architecture_of(config).to_hf(model.state_dict())


def _filled(
    model: Transformer,
    expected: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """The model on the CPU with the weights of `state`, which must be those that are expected, in `dtype`."""
    architecture = architecture_of(model.config)
    given = _untied(model, architecture, expected, state)
    model = model.to(dtype).to_empty(device="cpu")
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in architecture.from_hf(given).items():
            own[name].copy_(tensor)
    return model


def _untied(
    model: Transformer, architecture: Architecture, expected: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights of `state`, which must be those that are expected, without the second name of a tied one."""
    given = architecture.clean(state)
    tied = None
    if model.output is None:
        embedding_name, output_name = (_name_of(architecture, ours) for ours in ("embedding", "output"))
        tied = given.pop(output_name, None)
    check_shapes(expected, given)
    if tied is not None and not _is_same(given[embedding_name], tied):
        raise OnstepError(
            f"the weights contain an {output_name} that differs from {embedding_name}, but the configuration ties "
            "them; set tie_word_embeddings (share_embeddings_and_output_weights) to false."
        )
    return given


def _is_same(one: Tensor, other: Tensor) -> bool:
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one is other or torch.equal(value_of(one).to(dtype), value_of(other).to(dtype))


def _name_of(architecture: Architecture, module: str) -> str:
    return f"{architecture.modules[module]}.weight"


def check_shapes(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse (OnstepError) weights that are not those of a model, by name, shape and type.

    Args:
        expected: the model's weights under `transformers`' names.
        given: the weights of files, which need no values.
    """
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    misshaped = [
        f"{name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    ]
    quantized = [
        f"{name} is {str(given[name].dtype).removeprefix('torch.')}"
        for name in expected
        if name in given and given[name].dtype not in FLOATS
    ]
    problems = {
        "missing": missing,
        "unknown": unknown,
        "with a different shape": misshaped,
        "of a type other than a float of 16, 32 or 64 bits": quantized,
    }
    found = [f"{len(names)} {kind} ({_first(names)})" for kind, names in problems.items() if names]
    if found:
        raise OnstepError(
            f"the weights do not match the model configuration: {'; '.join(found)}. "
            "Use the configuration that the weights were saved with."
        )


def _first(names: list[str]) -> str:
    return ", ".join(name[:_MAX_NAME] for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


CONFIG_FILE = "config.json"


def load_hf_config(directory: str | Path) -> ModelConfig:
    """The configuration of the model in `directory`, from its `config.json` alone. Raises like `load_hf`."""
    return config_from_hf(read_object(Path(directory) / CONFIG_FILE))


def load_hf(
    directory: str | Path, config: ModelConfig | None = None, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Load the model (Llama, Qwen, GPT-2) in `directory` on the CPU, from one or more safetensors files.

    Args:
        directory: the directory with the weights.
        config: the model's configuration, to use instead of `config.json`.
        dtype: the type of its weights; each is converted as it is read.

    Raises:
        ConfigError: for an architecture or feature that `Transformer` does not support.
        OnstepError: if `config.json` or the safetensors files are missing or unreadable, or the weights do not match.
    """
    target = Path(directory)
    config = load_hf_config(target) if config is None else config
    files = weight_files(target)
    shapes = read_shapes(files)
    check_room(config, shapes, target, dtype=dtype)
    model, expected = _unfilled(config)
    architecture = architecture_of(config)
    given = architecture.clean(shapes)
    if model.output is None:
        given.pop(_name_of(architecture, "output"), None)
    check_shapes(expected, given)
    return _filled(model, expected, read_tensors(files), dtype)
