"""Models to and from `transformers`: `config.json`, weights, and the folder that `from_pretrained` opens."""

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

from onstep.config.part import nearest
from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError, OnstepError
from onstep.models.heads import replicated_layers
from onstep.models.hf.architecture import HF_ACTIVATIONS, SHARED_KEYS, Architecture, described
from onstep.models.hf.gpt2 import GPT2
from onstep.models.hf.llama import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from onstep.models.sizes import check_model_config
from onstep.models.transformer import Transformer, empty_transformer

ARCHITECTURES: tuple[Architecture, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT2)
"""In the order in which they are tried for a configuration."""

_SHOWN = 5
"""Names listed in an error."""


def architecture_of(config: ModelConfig) -> Architecture:
    """The architecture that computes what a model of `config` computes.

    Raises:
        ConfigError: there is none; names the options that the most similar one does not have.
    """
    has_experts = config.num_moe_experts is not None
    found = [(architecture.obstacles(config), architecture) for architecture in ARCHITECTURES]
    obstacles, nearest_one = min(found, key=lambda one: (len(one[0]), has_experts and one[1] is not QWEN3_MOE))
    if obstacles:
        raise ConfigError(
            f"none of transformers' architectures that Onstep converts computes this model; "
            f"{nearest_one.class_name} comes nearest, but does not take {', '.join(obstacles)}. "
            f"Keep the model in Onstep's checkpoints, or change it for a model that transformers is to open."
        )
    return nearest_one


def hf_config_dict(config: ModelConfig, *, eos_id: int | None = None, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` with which `transformers` builds the same model.

    It becomes a Llama, a Qwen2 (biases of q, k and v), a Qwen3 (norms of queries and keys) or a GPT-2 (LayerNorm,
    learned positions, no gate, biases). The longest sequence there is `seq_length`. Where the architecture has no
    dropout of the residual stream `hidden_dropout` is left out; it matters in training only.

    Args:
        eos_id: token at which `transformers` ends a generated text; None is none.
        dtype: of the stored weights, as `transformers` writes it.

    Raises:
        ConfigError: options or sizes that no architecture takes.
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

    `seq_length` is the longest sequence there. What the file leaves out has `transformers`' default.

    Raises:
        ConfigError: another architecture, a missing size, or a feature that `Transformer` does not have.
    """
    model_type, known = hf_config.get("model_type"), {one.model_type: one for one in ARCHITECTURES}
    if model_type not in known:
        hint = nearest(model_type, list(known)) if isinstance(model_type, str) else ""
        raise ConfigError(f"config.json has model_type {model_type!r}; only {', '.join(known)} can be converted.{hint}")
    architecture = known[model_type]
    values = {**architecture.defaults, **hf_config}
    further = architecture.read(values)
    options = {ours: values.get(theirs) for theirs, ours in {**SHARED_KEYS, **architecture.keys}.items()}
    if options["activation_func"] not in HF_ACTIVATIONS:
        raise ConfigError(
            f"config.json has the activation function {options['activation_func']!r}, which Onstep's Transformer does "
            f"not have; convert a model with one of {', '.join(HF_ACTIVATIONS)}."
        )
    options["activation_func"] = HF_ACTIVATIONS[options["activation_func"]]
    config = ModelConfig(**{**options, **architecture.options, **further})
    check_model_config(config)
    return config


def to_hf_state_dict(model: Transformer) -> dict[str, Tensor]:
    """The weights under `transformers`' names; tied ones once, as the embedding.

    They share memory with the model where `transformers` stores them alike.

    Raises:
        ConfigError: a model that no architecture of `transformers` computes, or one with a value head.
    """
    architecture = architecture_of(model.config)
    check_heads(model, architecture.class_name)
    return architecture.to_hf(model.state_dict())


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
    expected = architecture.to_hf({name: tensor.to("meta") for name, tensor in own.items()})
    given = architecture.clean(state)
    if model.output is None:
        embedding_name, output_name = (f"{architecture.modules[ours]}.weight" for ours in ("embedding", "output"))
        embedding, output = given.get(embedding_name), given.pop(output_name, None)
        if embedding is not None and output is not None and not torch.equal(embedding, output):
            raise OnstepError(
                f"the weights hold an {output_name} that differs from {embedding_name}, but the "
                "configuration ties them; set tie_word_embeddings (share_embeddings_and_output_weights) to false."
            )
    _check_weights(expected, given)
    with torch.no_grad():
        for name, tensor in architecture.from_hf(given).items():
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
    weights, text = folder / f"{WEIGHTS_FILE}.partial", folder / f"{CONFIG_FILE}.partial"
    save_file(tensors, weights, metadata={"format": "pt"})
    umask = os.umask(0o077)
    os.umask(umask)
    weights.chmod(0o666 & ~umask)  # the library makes it readable by its owner only
    os.replace(weights, folder / WEIGHTS_FILE)
    text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(text, folder / CONFIG_FILE)
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
        try:
            state |= load_file(file)
        except SafetensorError as error:
            raise OnstepError(f"{file} is not a whole safetensors file ({error}); write or copy it anew.") from error
    return from_hf_state_dict(config, state)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        index = folder / INDEX_FILE
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise OnstepError(f"{index} has no weight_map from weights to files; write the folder anew.")
        names = sorted({str(name) for name in weight_map.values()})
        absent = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if absent:
            raise OnstepError(f"{index} names {absent[0]!r}, which is no file of that folder; copy all shards into it.")
        return [folder / name for name in names]
    pickles = [name for name in PICKLE_FILES if (folder / name).is_file()]
    if pickles:
        raise OnstepError(
            f"{folder} holds only {pickles[0]}, a pickle, and Onstep unpickles no file; convert it where you trust it: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER) writes safetensors."
        )
    raise OnstepError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; pass a folder with safetensors weights.")


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
