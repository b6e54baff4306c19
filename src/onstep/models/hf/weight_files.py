"""Writes and finds the safetensors files of a directory, and compares what they hold with a model before loading it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from onstep.config import ModelConfig
from onstep.errors import OnstepError
from onstep.files.bounded_reading import read_json
from onstep.files.durability import replace_durably
from onstep.models.deferred import value_of
from onstep.models.hf.values import short
from onstep.models.layers.feed_forward import is_moe_layer
from onstep.models.sizes import ffn_hidden_size, head_width, num_query_groups, vocabulary_size

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
"""Size of a file of weights from which on they are split, as the Hub recommends."""
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER = torch.uint8
_TYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""The types that a file can hold, narrow ones first, as `safetensors` orders them."""
_ORDER = {dtype: place for place, dtype in enumerate(_TYPE_NAMES)}
_WRITE_BYTES = 2**26
FLOATS = frozenset(_DTYPES.values())
"""The types of weights that are numbers as they are; narrower ones are quantized."""
_MAX_WORDS = 300


def write_weights(
    tensors: Mapping[str, Tensor],
    target: Path,
    max_shard_bytes: int,
    *,
    metadata: Mapping[str, str] | None = None,
    writes: bool = True,
) -> None:
    """Write weights as `model.safetensors`, or as shards of at most `max_shard_bytes` with an index.

    Each file is replaced atomically, and the files of the other form are removed at the end. A tensor is never split,
    and the values of deferred tensors are computed one after the other, even after an error: other ranks may wait for
    this one to take part in it.

    Args:
        tensors: the weights, some of which may be deferred.
        target: the directory, created if needed.
        max_shard_bytes: size of a file, in bytes.
        metadata: texts for the headers, beside the format.
        writes: whether this rank writes; if not, it joins in computing the values.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    values = _values(shards)
    try:
        if writes:
            target.mkdir(parents=True, exist_ok=True)
            _write_shards(shards, values, target, metadata or {})
    finally:
        for _ in values:
            pass


def _values(shards: list[dict[str, Tensor]]) -> Iterator[Tensor]:
    """The values of all weights, as they follow each other in the files."""
    for shard in shards:
        for name in _in_file_order(shard):
            yield value_of(shard[name])


def _write_shards(
    shards: list[dict[str, Tensor]], values: Iterator[Tensor], target: Path, metadata: Mapping[str, str]
) -> None:
    number = len(shards)
    names = [WEIGHTS_FILE] if number == 1 else [f"model-{i + 1:05}-of-{number:05}.safetensors" for i in range(number)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(shard, values, target / name, metadata)
    if number > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        replace_durably(target / INDEX_FILE, json.dumps(content, indent=2) + "\n")
    for old in [target / WEIGHTS_FILE, *target.glob("model-*-of-*.safetensors")]:
        if old.name not in names:
            old.unlink(missing_ok=True)
    if number == 1:
        (target / INDEX_FILE).unlink(missing_ok=True)


def _write_shard(tensors: dict[str, Tensor], values: Iterator[Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            write_file(file.write, tensors, metadata, values)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(
    write: Callable[[bytes | memoryview], object],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    values: Iterator[Tensor] | None = None,
) -> None:
    """Write one file of weights, each of which is computed when it is written, if it is deferred.

    Args:
        write: is given the bytes in order.
        tensors: the weights.
        metadata: texts for the header.
        values: those of the weights, in the order of the file; None computes them.
    """
    values = _values([dict(tensors)]) if values is None else values
    write(_header(tensors, metadata))
    for _ in tensors:
        memory = next(values).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, memory.nbytes, _WRITE_BYTES):
            write(memory[start : start + _WRITE_BYTES])
        del memory


def _in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names in the order of `safetensors`, which aligns each tensor to its items."""
    return sorted(tensors, key=lambda name: (-_ORDER[tensors[name].dtype], name))


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header of a file of weights, with its length in front, as `safetensors` writes it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for name in _in_file_order(tensors):
        tensor, end = tensors[name], position + tensors[name].nbytes
        kind = _TYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def weight_files(target: Path) -> list[Path]:
    """The safetensors files with the weights of a directory, one or those of its index.

    Raises:
        OnstepError: if there are none.
    """
    if (target / WEIGHTS_FILE).is_file():
        return [target / WEIGHTS_FILE]
    if (target / INDEX_FILE).is_file():
        index = target / INDEX_FILE
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise OnstepError(f"{index} has no weight_map from weights to files; write the directory again.")
        names = sorted({str(name) for name in weight_map.values()})
        absent = [name for name in names if not _is_within(target, name)]
        if absent:
            raise OnstepError(
                f"{index} lists {short(absent[0])}, which is not in that directory; copy all shards into it."
            )
        return [target / name for name in names]
    pickles = [name for name in PICKLE_FILES if (target / name).is_file()]
    if pickles:
        raise OnstepError(
            f"{target} holds only {pickles[0]}, a pickle, which Onstep does not load; convert it if you trust it: "
            f"AutoModelForCausalLM.from_pretrained({str(target)!r}).save_pretrained(NEW_DIR) writes safetensors."
        )
    raise OnstepError(f"{target} has no {WEIGHTS_FILE} or {INDEX_FILE}; pass a directory with safetensors weights.")


def _is_within(target: Path, name: str) -> bool:
    """Whether `name` is a file of the directory itself; a name that no file can have is not."""
    try:
        return Path(name).name == name and (target / name).is_file()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OnstepError: if the file is missing, unreadable, or holds something else.
    """
    if not path.is_file():
        raise OnstepError(f"{path} does not exist; pass a directory written by save_hf or save_pretrained.")
    try:
        content = read_json(path, error=OnstepError)
    except OnstepError as error:
        raise OnstepError(f"{error} Write or copy it again.") from error
    except OSError as error:
        raise OnstepError(f"{path} cannot be read: {error.strerror or error}; check its permissions.") from error
    if not isinstance(content, dict):
        raise OnstepError(f"{path} must contain a JSON object, got {type(content).__name__}; write or copy it again.")
    return content


def read_shapes(files: list[Path]) -> dict[str, Tensor]:
    """The weights as tensors on the meta device, from the headers of the files.

    Raises:
        OnstepError: for a damaged file, for a tensor without elements, and for one in two files.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        with naming(file), safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                shape, dtype = part.get_shape(), part.get_dtype()
                if name in found or 0 in shape:
                    problem = "which another file has too" if name in found else f"of shape {tuple(shape)}"
                    raise OnstepError(f"{file} has the tensor {short(name)} {problem}; save or copy the model again.")
                found[name] = torch.empty(shape, dtype=_DTYPES.get(dtype, _OTHER), device="meta")
    return found


def read_tensors(files: list[Path]) -> dict[str, Tensor]:
    """The weights in the files. Raises like `read_shapes`."""
    state: dict[str, Tensor] = {}
    for file in files:
        with naming(file):
            state |= load_file(file)
    return state


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Raise an OnstepError that names the file for what is damaged or unreadable within the block."""
    try:
        yield
    except SafetensorError as error:
        words = str(error)[:_MAX_WORDS]  # it may quote the file
        raise OnstepError(f"{file} is not a complete safetensors file ({words}); save or copy it again.") from error
    except (OSError, MemoryError) as error:  # or not mapped into memory
        raise OnstepError(f"{file} cannot be read ({error}); save or copy it again.") from error


def check_room(
    config: ModelConfig,
    shapes: Mapping[str, Tensor],
    target: Path,
    memory_bytes: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Refuse a model that is larger than its weights on disk or than this machine, before memory is allocated.

    Args:
        dtype: the type that its weights will have.
        memory_bytes: memory of the machine; None asks the operating system.

    Raises:
        OnstepError: with the estimate and what there is.
    """
    expected, found = least_parameters(config), sum(tensor.numel() for tensor in shapes.values())
    if expected > found:
        raise OnstepError(
            f"the configuration describes a model of at least {expected:,} parameters ({_gigabytes(expected)} in "
            f"float32), but the weights in {target} have {found:,}. Use the configuration that the weights were saved "
            "with."
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if memory_bytes is None else memory_bytes
    if dtype.itemsize * expected > memory:
        kind = str(dtype).removeprefix("torch.")
        raise OnstepError(
            f"the model in {target} has {expected:,} parameters and requires "
            f"{_gigabytes(expected, dtype.itemsize)} in {kind}, but "
            f"this machine has {memory / 1e9:,.1f} GB of memory; use a larger one."
        )


def _gigabytes(parameters: int, item_size: int = 4) -> str:
    return f"{item_size * parameters / 1e9:,.1f} GB"


def least_parameters(config: ModelConfig) -> int:
    """Number of elements in the matrices of the embedding and the layers: all but biases, norms and the output."""
    hidden, width = config.hidden_size, head_width(config)
    attention = 2 * hidden * width * (config.num_attention_heads + num_query_groups(config))
    matrices = 3 if config.gated_linear_unit else 2
    dense = matrices * hidden * ffn_hidden_size(config)
    experts = 0 if config.num_moe_experts is None else sum(is_moe_layer(config, i) for i in range(config.num_layers))
    expert_width = config.moe_ffn_hidden_size or ffn_hidden_size(config)
    sparse = hidden * (config.num_moe_experts or 0) * (1 + matrices * expert_width)
    layers = config.num_layers * attention + (config.num_layers - experts) * dense + experts * sparse
    return vocabulary_size(config) * hidden + layers
