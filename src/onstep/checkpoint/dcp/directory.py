"""Opens a directory that torch.distributed.checkpoint wrote: torchtitan's, accelerate's, or one of safetensors.

Its `.metadata` is a pickle, and so is a part of each tensor; both are described (`describe`), never loaded. What is
only in a pickle, such as counters and settings, has a name here and no value.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from onstep.checkpoint.dcp.described import Elsewhere, Made, MalformedPickleError, Named, Pairs, describe
from onstep.checkpoint.format.stored_tensors import StoredPart, StoredTensor, joined, open_tensors
from onstep.checkpoint.format.tensor_file import opened
from onstep.checkpoint.format.tensor_header import DTYPE_NAMES, TensorInfo
from onstep.distributed.boxes import Box
from onstep.errors import CheckpointError
from onstep.files.bounded_reading import read_bytes

METADATA = ".metadata"
MAX_METADATA_BYTES = 512 * 1024**2
_LOCAL_HEADER_BYTES = 30
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}


@dataclass(frozen=True)
class DcpDirectory:
    """What is in a directory of torch.distributed.checkpoint."""

    tensors: dict[str, StoredTensor]
    """By name; each can be read alone."""
    pickled: list[str] = field(default_factory=list)
    """The names of what is only in a pickle."""


def open_dcp(directory: Path) -> DcpDirectory:
    """Find the tensors of a directory; no values are read.

    Raises:
        CheckpointError: if it is none, or a file is damaged, compressed, or outside of it.
    """
    path = directory / METADATA
    if path.is_file():
        try:
            return _of_metadata(directory, describe(read_bytes(path, MAX_METADATA_BYTES, error=CheckpointError)))
        except MalformedPickleError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; copy the directory again.") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return DcpDirectory(open_tensors(files))
    inner = sorted(str(one.parent) for one in directory.glob(f"*/{METADATA}"))
    hint = f"; give one of {', '.join(inner[:5])}" if inner else ", as a finished save leaves it"
    raise CheckpointError(f"{directory} has no {METADATA} and no safetensors files{hint}.")


def _of_metadata(directory: Path, metadata: Any) -> DcpDirectory:
    known = _fields(metadata, "Metadata")
    places = {_place(index): _fields(info, "_StorageInfo") for index, info in _pairs(known.get("storage_data"))}
    tensors: dict[str, StoredTensor] = {}
    pickled: list[str] = []
    for name, described in _pairs(known.get("state_dict_metadata")):
        if not isinstance(name, str) or not isinstance(described, Made):
            raise MalformedPickleError("a state has no name")
        if described.kind == "BytesStorageMetadata":
            pickled.append(name)
            continue
        fields = _fields(described, "TensorStorageMetadata")
        dtype, shape = _dtype(name, fields.get("properties")), _size(fields.get("size"))
        parts: list[StoredPart] = []
        for chunk in fields.get("chunks") or []:
            of_chunk = _fields(chunk, "ChunkStorageMetadata")
            box = Box(_size(of_chunk.get("offsets")), _size(of_chunk.get("sizes")))
            if box.numel or not parts:
                parts.append(_part(directory, name, dtype, box, places))
        if not parts:
            raise MalformedPickleError(f"{name[:100]!r} is not stored")
        tensors[name] = joined(name, shape, tuple(parts))
    return DcpDirectory(tensors, pickled)


def _part(
    directory: Path, name: str, dtype: torch.dtype, box: Box, places: Mapping[tuple[str, tuple[int, ...]], Any]
) -> StoredPart:
    """Where the elements of a box are in the files."""
    found = places.get((name, box.offsets))
    if found is None:
        raise MalformedPickleError(f"{name[:100]!r} has no place for its part at {list(box.offsets)}")
    relative, offset, length = (found.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(relative, str) or not isinstance(offset, int) or not isinstance(length, int):
        raise MalformedPickleError(f"{name[:100]!r} has no place in a file")
    if Path(relative).name != relative:
        raise CheckpointError(f"{directory}: {name[:100]!r} is in {relative[:100]!r}, outside of the directory.")
    path = directory / relative
    if found.get("transform_descriptors"):
        raise CheckpointError(f"{path} is compressed, which cannot be read part by part; save it without extensions.")
    with opened(path) as file:
        start = _start_of_elements(file, path, name, box, offset, length)
    return StoredPart(box, path, TensorInfo(dtype, box.sizes, start, box.numel * dtype.itemsize))


def _start_of_elements(file: BufferedReader, path: Path, name: str, box: Box, offset: int, length: int) -> int:
    """Where the elements begin in the archive that `torch.save` wrote to a part of a file."""
    if offset < 0 or length < 0 or offset + length > os.fstat(file.fileno()).st_size:
        raise CheckpointError(f"{path} ends before {name[:100]!r}, which it should have; copy it again.")
    try:
        with zipfile.ZipFile(cast(BinaryIO, _Window(file, offset, length))) as archive:
            entries = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            described = describe(archive.read(entries["data.pkl"]))
            order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
            key = _check_layout(described, box)
            elements = entries[f"data/{key}"]
    except (zipfile.BadZipFile, KeyError, MalformedPickleError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path}: {name[:100]!r} is not stored as torch.save stores a tensor of {list(box.sizes)} ({error}); load "
            f"it by torch.distributed.checkpoint in a program of your own, and save the tensors by safetensors."
        ) from error
    if elements.compress_type != zipfile.ZIP_STORED or order != b"little":
        raise CheckpointError(f"{path}: {name[:100]!r} is compressed or big-endian, which cannot be read.")
    file.seek(offset + elements.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = offset + elements.header_offset + _LOCAL_HEADER_BYTES + names
    if start + elements.file_size > offset + length:
        raise CheckpointError(f"{path}: the elements of {name[:100]!r} are not complete; copy it again.")
    return start


def _check_layout(described: Any, box: Box) -> str:
    """The key of the elements, which must be one after the other and no others."""
    arguments: tuple[Any, ...] = ()
    if isinstance(described, Made) and isinstance(described.arguments, tuple):
        arguments = described.arguments
    if len(arguments) < 4 or not described.kind.startswith("_rebuild_tensor_v"):
        raise MalformedPickleError("it is not a plain tensor")
    storage, first, sizes, strides = arguments[:4]
    reference = storage.reference if isinstance(storage, Elsewhere) else ()
    if not isinstance(reference, tuple) or len(reference) < 5 or not isinstance(reference[2], str):
        raise MalformedPickleError("its elements are not beside it")
    own: list[int] = []
    step = 1
    for size in reversed(box.sizes):
        own.insert(0, step)
        step *= size
    given = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    expected = [(size, stride) for size, stride in zip(box.sizes, own, strict=True) if size != 1]
    if first != 0 or tuple(sizes) != box.sizes or (given != expected and box.numel):
        raise MalformedPickleError(f"it has the sizes {sizes} and strides {strides} from element {first} on")
    return reference[2]


class _Window(RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the start")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._file.seek(self._start + self._position)
        content = self._file.read(left if size is None or size < 0 else min(size, left))
        self._position += len(content)
        return content


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Made) or value.kind != kind:
        raise MalformedPickleError(f"it has no {kind} where torch.distributed.checkpoint writes one")
    return value.fields()


def _pairs(value: Any) -> Pairs:
    if not isinstance(value, Pairs):
        raise MalformedPickleError("it has no dictionary where torch.distributed.checkpoint writes one")
    return value


def _place(index: Any) -> tuple[str, tuple[int, ...]]:
    fields = _fields(index, "MetadataIndex")
    offset = fields.get("offset")
    return str(fields.get("fqn")), () if offset is None else _size(offset)


def _size(value: Any) -> tuple[int, ...]:
    """A `torch.Size`."""
    items = value.arguments[0] if isinstance(value, Made) and value.kind == "Size" and value.arguments else value
    if not isinstance(items, (tuple, list)) or not all(type(one) is int and one >= 0 for one in items):
        raise MalformedPickleError("it has no sizes where torch.distributed.checkpoint writes them")
    return tuple(items)


def _dtype(name: str, properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Made) else None
    first = state[0] if isinstance(state, tuple) and state else None
    dtype = _DTYPES.get(first.name) if isinstance(first, Named) and first.module == "torch" else None
    if dtype is None:
        shown = first.name[:40] if isinstance(first, Named) else "no dtype"
        raise CheckpointError(f"{name[:100]!r} is of {shown}, which a file of safetensors cannot hold.")
    return dtype
