"""Writes models as GGUF files, which llama.cpp and the programs built on it read."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models.deferred import value_of
from onstep.models.hf.directory import architecture_of
from onstep.models.hf.gguf_types import DTYPES, converted, file_type_of, import_gguf, stored_as, stored_bytes
from onstep.models.hf.writing import deferred_hf_weights
from onstep.models.layers.feed_forward import is_moe_layer
from onstep.models.layers.rotary import RotaryTables, scaling_type
from onstep.models.sizes import ffn_hidden_size, head_width, num_query_groups
from onstep.models.transformer import Transformer

Metadata = dict[str, Any]

_GGUF_NAMES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gpt2": "gpt2"}
"""GGUF's names of `transformers`' architectures."""
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)")
_CONV1D = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")
_ROTATED = re.compile(r".*\.(q|k)_proj\.weight")


def write_gguf(model: Transformer, path: Path, *, name: str, vocabulary: Metadata, kind: str) -> Counter[str]:
    """Write `model` to the new file `path`; returns the number of tensors by type.

    Args:
        name: the model's name in the file.
        vocabulary: `tokenizer.*` entries of the file, with one token per row of the embedding.
        kind: the type of its matrices, one of `writable_types()`; see `stored_as` for what is kept wider.

    Raises:
        ConfigError: for a model that llama.cpp cannot compute.
        MissingExtraError: if the `gguf` package is not installed.
    """
    gguf = import_gguf()
    architecture = _GGUF_NAMES[check_gguf(model.config)]
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {f"{architecture}.{key}": value for key, value in _sizes(model.config).items()}
    general = {"general.name": name, "general.file_type": file_type_of(kind)}
    if kind not in DTYPES.values():
        general["general.quantization_version"] = int(gguf.GGML_QUANT_VERSION)
    for key, value in (general | sizes | vocabulary).items():
        _add(writer, key, value)
    arch = next(one for one, theirs in gguf.MODEL_ARCH_NAMES.items() if theirs == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_layers)
    found: list[tuple[Tensor, str]] = []
    for hf_name, tensor in _tensors(model).items():
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        own = stored_as(tensor, gguf_name, kind)
        raw = gguf.GGMLQuantizationType[own]
        writer.add_tensor_info(gguf_name, tuple(tensor.shape), np.dtype("f4"), stored_bytes(tensor, own), raw)
        found.append((tensor, own))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, own in found:  # so that one at a time is in memory
        writer.write_tensor_data(converted(value_of(tensor), own))
    writer.close()
    return Counter(own for _, own in found)


def check_gguf(config: ModelConfig) -> str:
    """The `model_type` in `transformers` of a model that llama.cpp can compute.

    Raises:
        ConfigError: naming the options that it cannot.
    """
    model_type = architecture_of(config).model_type
    activation = "gelu_tanh" if model_type == "gpt2" else "silu"
    scaling = scaling_type(config.rope_scaling)
    known = ("default", "linear", "llama3") if model_type == "llama" else ("default", "linear")
    has_biases = model_type != "gpt2" and config.add_bias_linear
    dense = model_type == "qwen3_moe" and not all(is_moe_layer(config, i) for i in range(config.num_layers))
    obstacles = {
        f"activation_func={config.activation_func!r} (only {activation!r})": config.activation_func != activation,
        f"rope_scaling of type {scaling!r} (only {', '.join(known)})": scaling not in known,
        "add_bias_linear=True": has_biases,
        f"moe_layer_freq={config.moe_layer_freq!r} (only experts in every layer)": dense,
        "moe_router_pre_softmax=True": model_type == "qwen3_moe" and config.moe_router_pre_softmax,
    }
    found = [words for words, is_true in obstacles.items() if is_true]
    if found:
        raise ConfigError(
            f"llama.cpp's {_GGUF_NAMES[model_type]} does not support {', '.join(found)}, so no GGUF file can be "
            "written; export the model with --format hf, for transformers."
        )
    return model_type


def _sizes(config: ModelConfig) -> Metadata:
    """Entries of the file that describe the architecture, without its name in front."""
    norm = "layer_norm_epsilon" if config.normalization == "LayerNorm" else "layer_norm_rms_epsilon"
    entries: Metadata = {
        "block_count": config.num_layers,
        "context_length": config.seq_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": ffn_hidden_size(config),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": num_query_groups(config),
        f"attention.{norm}": float(config.layernorm_epsilon),
        "vocab_size": config.vocab_size,
    }
    if config.position_embedding_type == "rope":
        entries |= {
            "attention.key_length": head_width(config),
            "attention.value_length": head_width(config),
            "rope.dimension_count": head_width(config),
            "rope.freq_base": float(config.rotary_base),
        }
    if config.rope_scaling is not None and scaling_type(config.rope_scaling) == "linear":
        entries |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_scaling["factor"])}
    if config.num_moe_experts is not None:
        entries |= {
            "expert_count": config.num_moe_experts,
            "expert_used_count": config.moe_router_topk,
            "expert_feed_forward_length": config.moe_ffn_hidden_size or ffn_hidden_size(config),
        }
    return entries


def _add(writer: Any, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def _tensors(model: Transformer) -> dict[str, Tensor]:
    """The weights under `transformers`' names in llama.cpp's layouts, with the experts of a layer in one tensor."""
    config = model.config
    heads = {"q": config.num_attention_heads, "k": num_query_groups(config)}
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in deferred_hf_weights(model).items():
        rotated = _ROTATED.fullmatch(name)
        if expert := _EXPERT.fullmatch(name):
            experts.setdefault(".".join(expert.groups()), []).append(tensor)
        elif _CONV1D.fullmatch(name):  # stored as (in, out) by transformers' GPT-2 only
            found[name] = tensor.transpose(0, 1)
        elif rotated and architecture_of(config).model_type == "llama":
            found[name] = _interleaved(tensor, heads[rotated[1]])
        else:
            found[name] = tensor
    found |= {name: torch.stack(each) for name, each in experts.items()}
    return found | _rotary_factors(config)


def _interleaved(matrix: Tensor, num_heads: int) -> Tensor:
    """Rows of a head in the order in which llama.cpp's Llama rotates them: the two elements of a pair side by side."""
    return matrix.reshape(num_heads, 2, -1, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)


def _rotary_factors(config: ModelConfig) -> dict[str, Tensor]:
    """What llama.cpp divides each rotary frequency by, for Llama 3's scaling."""
    if scaling_type(config.rope_scaling) != "llama3":
        return {}
    plain, scaled = (
        RotaryTables(head_width(config), config.rotary_base, 1, scaling).frequencies
        for scaling in (None, config.rope_scaling)
    )
    return {"rope_freqs.weight": plain / scaled}
