"""Builds the header of a safetensors file, and validates the header of a file to be read down to the last byte.

The format: eight bytes with the length of the header (little-endian), the header as JSON, then the tensors' bytes,
contiguous and without gaps. Source: https://huggingface.co/docs/safetensors (section "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from onstep.errors import CheckpointError, UnsupportedStateError
from onstep.files.bounded_reading import DIGITS_OF_64_BITS, parse_json

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
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
"""The dtypes that a tensor file can hold, with their names in the format."""

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
METADATA_KEY = "__metadata__"
SHARDING_KEY = "DCP_SHARDING_INFO"
"""The key under which torch.distributed.checkpoint keeps, as JSON text, the offsets of each tensor in the full one."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 64 * 1024**2
"""Enough for about half a million tensors; the format's own limit is 100 MB."""
MAX_DIMENSIONS = 64
MAX_ITEMS = 2**58
"""More than any disk can hold; torch counts bytes in 63 bits."""


@dataclass(frozen=True)
class TensorInfo:
    """The header's entry for one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Bytes from the start of the file."""
    size_bytes: int


class TensorHeader(NamedTuple):
    """The header of a tensor file."""

    tensors: dict[str, TensorInfo]
    """In file order; together they fill the file exactly."""
    metadata: dict[str, str]
    """Texts by name."""


def ordered_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The order on disk: large items first, so that every tensor is aligned to its own item size.

    Within one item size, tensors of odd lengths come last: the copies of a snapshot are then adjacent in memory and are
    written together.
    """
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), tensors[name].nbytes % 64 != 0, name))


def build_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and header of a file with these tensors, padded so that their bytes start at a multiple of 8.

    Raises:
        UnsupportedStateError: for a tensor, name or metadata that the format cannot hold.
    """
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UnsupportedStateError(f"metadata of a tensor file must map str to str, got {key!r}: {value!r}.")
    header: dict[str, Any] = {METADATA_KEY: {"format": "pt", **metadata}}
    dtypes = {name: _dtype_name(name, tensor) for name, tensor in tensors.items()}
    position = 0
    for name in ordered_names(tensors):
        end = position + tensors[name].nbytes
        header[name] = {"dtype": dtypes[name], "shape": list(tensors[name].shape), "data_offsets": [position, end]}
        position = end
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedStateError(
            f"a tensor name or metadata value is not valid Unicode ({error.reason}); use names without unpaired "
            f"surrogates."
        ) from error
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise UnsupportedStateError(
            f"{len(tensors)} tensors need a header of {len(text)} bytes, but a tensor file allows {MAX_HEADER_BYTES}; "
            f"join small tensors into larger ones."
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _dtype_name(name: str, tensor: Tensor) -> str:
    if name == METADATA_KEY:
        raise UnsupportedStateError(f"a tensor cannot be named {METADATA_KEY}, which the format reserves; rename it.")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise UnsupportedStateError(f"{name}: only plain tensors can be written, got {type(tensor).__name__}.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UnsupportedStateError(f"{name}: only dense tensors with values can be written, got {tensor.layout}.")
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedStateError(f"{name}: a tensor file cannot hold {tensor.dtype}; convert the tensor.")
    return DTYPE_NAMES[tensor.dtype]


def sharding_metadata(
    tensors: Mapping[str, Tensor],
    offsets: Mapping[str, Sequence[int]],
    full_shapes: Mapping[str, Sequence[int]],
) -> dict[str, str]:
    """The metadata from which torch.distributed.checkpoint assembles tensors whose shards are in several files.

    A tensor without an entry starts at the origin of its full tensor and is all of it.

    Raises:
        CheckpointError: for an entry of an unknown tensor, or a shard that exceeds its full tensor.
    """
    unknown = sorted((set(offsets) | set(full_shapes)) - set(tensors))
    if unknown:
        raise CheckpointError(f"offsets or full_shapes name {unknown}, which are not among the tensors.")
    sharding: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        offset = list(offsets.get(name, [0] * tensor.dim()))
        full = list(full_shapes.get(name, [at + size for at, size in zip(offset, tensor.shape, strict=False)]))
        fits = len(offset) == len(full) == tensor.dim() and all(
            at >= 0 and at + size <= whole for at, size, whole in zip(offset, tensor.shape, full, strict=True)
        )
        if not fits:
            raise CheckpointError(
                f"{name}: a shard of shape {list(tensor.shape)} at {offset} exceeds a tensor of shape {full}."
            )
        sharding[name] = {"saved_offsets": offset, "full_shape": full}
    return {SHARDING_KEY: json.dumps(sharding, separators=(",", ":"))}


def header_length(where: str, first_bytes: bytes, file_size: int) -> int:
    """Length of the header in bytes, checked against the file size and the limit before anything is read.

    Raises:
        CheckpointError: for a file that cannot be a tensor file.
    """
    if len(first_bytes) < LENGTH_BYTES:
        _refuse(where, f"it has {file_size} bytes, but a tensor file has at least {LENGTH_BYTES + 2}")
    length = int.from_bytes(first_bytes, "little")
    if length > file_size - LENGTH_BYTES:
        _refuse(where, f"its header should have {length} bytes, but the file has {file_size}")
    if not 2 <= length <= MAX_HEADER_BYTES:
        _refuse(where, f"its header should have {length} bytes, allowed are 2 to {MAX_HEADER_BYTES}")
    return length


def parse_header(where: str, text: bytes, file_size: int) -> TensorHeader:
    """The tensors and the metadata of a file.

    Raises:
        CheckpointError: for anything else, with the file and the reason.
    """
    header = parse_json(
        text,
        f"{where} is not a tensor file: its header",
        error=CheckpointError,
        max_digits=DIGITS_OF_64_BITS,
        allows_constants=False,
    )
    if not isinstance(header, dict):
        _refuse(where, "its header is not a JSON object")
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(where, f"{METADATA_KEY} does not map strings to strings")
    start = LENGTH_BYTES + len(text)
    infos = {name: _tensor_info(where, name, entry, start) for name, entry in header.items()}
    ordered = dict(sorted(infos.items(), key=lambda item: (item[1].start, item[1].size_bytes)))
    position = start
    for name, info in ordered.items():
        if info.start != position:
            kind = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
            _refuse(where, f"{name[:100]!r} {kind}")
        position += info.size_bytes
    if position != file_size:
        _refuse(where, f"it has {file_size} bytes, but its header describes {position}; it was truncated or added to")
    return TensorHeader(ordered, metadata)


def sharding_of(where: str, header: TensorHeader) -> dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """The offsets of each tensor in the full one, and the full one's shape (None if unknown), by `SHARDING_KEY`.

    Empty for a file without.

    Raises:
        CheckpointError: for metadata that does not fit the tensors, with the file and the reason.
    """
    text = header.metadata.get(SHARDING_KEY)
    if text is None:
        return {}
    of_all = parse_json(
        text.encode(),
        f"{where} is not a tensor file: its {SHARDING_KEY}",
        error=CheckpointError,
        allows_constants=False,
    )
    if not isinstance(of_all, dict) or set(of_all) != set(header.tensors):
        _refuse(where, f"its {SHARDING_KEY} must name its tensors")
    found = {}
    for name, info in header.tensors.items():
        entry = of_all[name] if isinstance(of_all[name], dict) else {}
        offsets: Any = entry.get("saved_offsets")
        full: Any = entry.get("full_shape")
        given = [offsets] if full is None else [offsets, full]
        fits = all(_are_sizes(one) and len(one) == len(info.shape) for one in given)
        if fits and full is not None:
            fits = all(at + size <= n for at, size, n in zip(offsets, info.shape, full, strict=True))
        if not fits:
            _refuse(where, f"the {SHARDING_KEY} of {name[:100]!r} does not fit a shard of shape {list(info.shape)}")
        found[name] = (tuple(offsets), None if full is None else tuple(full))
    return found


def _tensor_info(where: str, full_name: str, entry: Any, data_start: int) -> TensorInfo:
    name = full_name[:100]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(where, f"the entry of {name!r} must have dtype, shape and data_offsets and nothing else")
    dtype = DTYPES_BY_NAME.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        _refuse(where, f"{name!r} has a dtype that is not part of the format")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or math.prod(max(size, 1) for size in shape) > MAX_ITEMS:
        _refuse(where, f"{name!r} has an invalid shape")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(where, f"{name!r} has invalid data_offsets")
    size_bytes = offsets[1] - offsets[0]
    if math.prod(shape) * dtype.itemsize != size_bytes:
        _refuse(where, f"{name!r} of shape {shape} and {dtype} does not fill its {size_bytes} bytes")
    return TensorInfo(dtype, tuple(shape), data_start + offsets[0], size_bytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _refuse(where: str, reason: str) -> NoReturn:
    raise CheckpointError(f"{where} is not a tensor file: {reason}.")
