"""Converts models to and from `transformers`: `config.json`, weights, and directories for `from_pretrained`."""

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

from onstep.config import ModelConfig
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError, OnstepError
from onstep.models.heads import replicated_layers
from onstep.models.hf.architecture import HF_ACTIVATIONS, SHARED_KEYS, Architecture, described
from onstep.models.hf.gpt2 import GPT2
from onstep.models.hf.llama import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from onstep.models.sizes import check_model_config
from onstep.models.transformer import Transformer, empty_transformer

ARCHITECTURES: tuple[Architecture, ...] = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GPT2)
"""Supported architectures, in the order in which they are tried for a configuration."""

_SHOWN = 5
"""Number of names listed in an error."""


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

    Raises:
        ConfigError: for another architecture, a missing size, or a feature that `Transformer` does not support.
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
            f"not support; convert a model with one of {', '.join(HF_ACTIVATIONS)}."
        )
    options["activation_func"] = HF_ACTIVATIONS[options["activation_func"]]
    config = ModelConfig(**{**options, **architecture.options, **further})
    check_model_config(config)
    return config


def to_hf_state_dict(model: Transformer) -> dict[str, Tensor]:
    """The weights under `transformers`' names; tied ones once, as the embedding.

    They share memory with the model if `transformers` stores them in the same layout.

    Raises:
        ConfigError: for a model that no `transformers` architecture computes, or one with a value head.
    """
    architecture = architecture_of(model.config)
    check_heads(model, architecture.class_name)
    return architecture.to_hf(model.state_dict())


def hf_obstacle(model: Transformer) -> str | None:
    """The reason why `transformers` cannot open `model`, with a remedy; None if it can."""
    try:
        check_heads(model, architecture_of(model.config).class_name)
    except ConfigError as error:
        return str(error)
    return None


def check_heads(model: nn.Module, class_name: str) -> None:
    """Refuse a model with a layer that has no counterpart in `transformers`' language models.

    Raises:
        ConfigError: naming the layer.
    """
    for name, layer in replicated_layers(model).items():
        raise ConfigError(
            f"the model's {name!r} is a value head ({type(layer).__name__}), which transformers' {class_name} does "
            f"not have; keep the model in Onstep checkpoints, or restore its language-model head."
        )


def from_hf_state_dict(config: ModelConfig, state: Mapping[str, Tensor]) -> Transformer:
    """A model of `config` with the weights of a `transformers` model, copied into float32 on the CPU.

    The output matrix of a tied model may be absent or equal to the embedding.

    Raises:
        ConfigError: for a configuration that cannot be built, or that no `transformers` architecture supports.
        OnstepError: for missing, unknown or misshaped weights.
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
                f"the weights contain an {output_name} that differs from {embedding_name}, but the "
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
    problems = {"missing": missing, "unknown": unknown, "with a different shape": misshaped}
    found = [f"{len(names)} {kind} ({_first(names)})" for kind, names in problems.items() if names]
    if found:
        raise OnstepError(
            f"the weights do not match the model configuration: {'; '.join(found)}. "
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
    """Write `model` to `directory`, created if needed, for `AutoModelForCausalLM.from_pretrained`.

    Each file is replaced atomically: a kill leaves either the old or the new one. Call it from one process. Tied
    weights are stored once.

    Args:
        tokenizer_files: files to copy next to the weights (`tokenizer.json`, `tokenizer_config.json`, ...).
        eos_id: token at which `transformers` ends generated text.

    Raises:
        ConfigError: for a model that no `transformers` architecture computes, or one with a value head.
    """
    target = Path(directory)
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    config = hf_config_dict(model.config, eos_id=eos_id, dtype=dtype)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in to_hf_state_dict(model).items()}
    target.mkdir(parents=True, exist_ok=True)
    weights, text = target / f"{WEIGHTS_FILE}.partial", target / f"{CONFIG_FILE}.partial"
    save_file(tensors, weights, metadata={"format": "pt"})
    umask = os.umask(0o077)
    os.umask(umask)
    weights.chmod(0o666 & ~umask)  # safetensors makes it readable by its owner only
    os.replace(weights, target / WEIGHTS_FILE)
    text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(text, target / CONFIG_FILE)
    for file in tokenizer_files:
        shutil.copy(file, target)


def load_hf_config(directory: str | Path) -> ModelConfig:
    """The configuration of the model in `directory`, from its `config.json` alone. Raises like `load_hf`."""
    return config_from_hf(_read_json(Path(directory) / CONFIG_FILE))


def load_hf(directory: str | Path, config: ModelConfig | None = None) -> Transformer:
    """Load the model (Llama, Qwen, GPT-2) in `directory` in float32 on the CPU, from one or more safetensors files.

    Args:
        directory: the directory with the weights.
        config: the model's configuration, to use instead of `config.json`.

    Raises:
        ConfigError: for an architecture or feature that `Transformer` does not support.
        OnstepError: if `config.json` or the safetensors files are missing or unreadable, or the weights do not match.
    """
    target = Path(directory)
    config = load_hf_config(target) if config is None else config
    state: dict[str, Tensor] = {}
    for file in _weight_files(target):
        try:
            state |= load_file(file)
        except SafetensorError as error:
            raise OnstepError(f"{file} is not a complete safetensors file ({error}); save or copy it again.") from error
    return from_hf_state_dict(config, state)


def _weight_files(target: Path) -> list[Path]:
    if (target / WEIGHTS_FILE).is_file():
        return [target / WEIGHTS_FILE]
    if (target / INDEX_FILE).is_file():
        index = target / INDEX_FILE
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise OnstepError(f"{index} has no weight_map from weights to files; write the directory again.")
        names = sorted({str(name) for name in weight_map.values()})
        absent = [name for name in names if Path(name).name != name or not (target / name).is_file()]
        if absent:
            raise OnstepError(f"{index} lists {absent[0]!r}, which is not in that directory; copy all shards into it.")
        return [target / name for name in names]
    pickles = [name for name in PICKLE_FILES if (target / name).is_file()]
    if pickles:
        raise OnstepError(
            f"{target} holds only {pickles[0]}, a pickle, which Onstep does not load; convert it if you trust it: "
            f"AutoModelForCausalLM.from_pretrained({str(target)!r}).save_pretrained(NEW_DIR) writes safetensors."
        )
    raise OnstepError(f"{target} has no {WEIGHTS_FILE} or {INDEX_FILE}; pass a directory with safetensors weights.")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise OnstepError(f"{path} does not exist; pass a directory written by save_hf or save_pretrained.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OnstepError(f"{path} is not valid JSON ({error}); write or copy it again.") from error
    if not isinstance(content, dict):
        raise OnstepError(f"{path} must contain a JSON object, got {type(content).__name__}; write or copy it again.")
    return content
