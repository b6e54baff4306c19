"""A model as a folder that `transformers`' `from_pretrained` opens: `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError, OnstepError
from onstep.models.hf_config import architecture_of, config_from_hf, hf_config_dict
from onstep.models.layer import replicated_layers
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
        embedding, output = given.get(architecture.embedding), given.get(architecture.output)
        if embedding is not None and output is not None and not torch.equal(embedding, output):
            raise OnstepError(
                f"the weights hold an {architecture.output} that differs from {architecture.embedding}, but the "
                "configuration ties them; set tie_word_embeddings (share_embeddings_and_output_weights) to false."
            )
        given = {name: tensor for name, tensor in given.items() if name != architecture.output}
    _check_weights(expected, given)
    with torch.no_grad():
        for name, tensor in architecture.from_hf(config, given).items():
            own[name].copy_(tensor)
    return model


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


CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def save_hf(
    model: Transformer,
    directory: str | Path,
    *,
    tokenizer_files: Sequence[str | Path] = (),
    eos_id: int | None = None,
) -> None:
    """Write `model` to `directory`, made if need be, so that `AutoModelForCausalLM.from_pretrained` opens it.

    Each file is replaced whole: a kill leaves the old one or the new one. One process calls this. Tied weights are
    stored once.

    Args:
        tokenizer_files: files copied beside the weights (`tokenizer.json`, `tokenizer_config.json`, ...).
        eos_id: token at which `transformers` ends a generated text.

    Raises:
        ConfigError: a model that no architecture of `transformers` computes, or one with a value head.
    """
    folder = Path(directory)
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    config = hf_config_dict(model.config, eos_id=eos_id, dtype=dtype)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in to_hf_state_dict(model).items()}
    folder.mkdir(parents=True, exist_ok=True)
    _save_weights(folder / WEIGHTS_FILE, tensors)
    _save_text(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    for file in tokenizer_files:
        shutil.copy(file, folder)


def load_hf_config(directory: str | Path) -> ModelConfig:
    """What the model in `directory` is, from its `config.json` alone. Raises as `load_hf`."""
    return config_from_hf(_read_json(Path(directory) / CONFIG_FILE))


def load_hf(directory: str | Path, config: ModelConfig | None = None) -> Transformer:
    """The model (Llama, Qwen, GPT-2) in `directory`, in float32 on the CPU, from one or several safetensors files.

    Args:
        directory: the folder.
        config: what the model is, where it is not to be read from `config.json`.

    Raises:
        ConfigError: an architecture or a feature that `Transformer` does not have.
        OnstepError: a folder without readable `config.json` and safetensors, or weights that do not fit.
    """
    folder = Path(directory)
    config = load_hf_config(folder) if config is None else config
    state: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        state |= _load_weights(file)
    return from_hf_state_dict(config, state)


def _save_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o666 & ~_umask())  # the library makes it readable by its owner only
    os.replace(partial, path)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _save_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        return _shards(folder)
    pickles = [name for name in PICKLE_FILES if (folder / name).is_file()]
    if pickles:
        raise OnstepError(
            f"{folder} holds only {pickles[0]}, a pickle, and Onstep unpickles no file; convert it where you trust it: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER) writes safetensors."
        )
    raise OnstepError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; pass a folder with safetensors weights.")


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise OnstepError(f"{index} has no weight_map from weights to files; write the folder anew.")
    names = sorted({str(name) for name in weight_map.values()})
    absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if absent:
        raise OnstepError(f"{index} names {absent[0]!r}, which is no file of that folder; copy all shards into it.")
    return [folder / name for name in names]


def _load_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise OnstepError(f"{path} is not a whole safetensors file ({error}); write or copy it anew.") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise OnstepError(f"{path} does not exist; pass a folder that save_hf or save_pretrained wrote.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OnstepError(f"{path} is not valid JSON ({error}); write or copy it anew.") from error
    if not isinstance(content, dict):
        raise OnstepError(f"{path} must hold a JSON object, got {type(content).__name__}; write or copy it anew.")
    return content
