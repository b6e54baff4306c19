"""Writes tensors to a safetensors file in bounded memory, and reads them back after checking every bound.

Other programs read these files too: `safetensors.torch.load_file`, and `HuggingFaceStorageReader` of
torch.distributed.checkpoint, which shards and reshards them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from onstep.checkpoint.format.tensor_header import (
    LENGTH_BYTES,
    TensorHeader,
    TensorInfo,
    build_header,
    header_length,
    ordered_names,
    parse_header,
    sharding_metadata,
)
from onstep.errors import CheckpointError
from onstep.files.bounded_reading import open_regular_file

__all__ = ["BinaryWriter", "FileDigest", "TensorInfo", "read_header", "read_tensors", "write_tensors"]

CHUNK_BYTES = 8 * 1024**2
"""Bytes staged at a time."""
WRITE_BYTES = 64 * 1024**2
"""Bytes passed to the writer at a time: each call waits for the GIL, which a training loop rarely releases."""
SMALL_BYTES = 256 * 1024
"""Tensors smaller than this are joined before they are written: an optimizer has thousands of them."""
READ_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class FileDigest:
    """Size and hash of a file, as its manifest records them."""

    size: int
    """Bytes."""
    blake3: str
    """64 hexadecimal digits."""


class BinaryWriter(Protocol):
    """Receives the bytes of a file in order. It may keep a buffer after the call: `write_tensors` never reuses one."""

    def write(self, buffer: bytes | memoryview, /) -> object:
        """Append all bytes of the buffer."""
        ...


def write_tensors(
    file: BinaryWriter,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    offsets: Mapping[str, Sequence[int]] | None = None,
    full_shapes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write one tensor file; beyond the tensors themselves, memory use is limited to a few chunks.

    The bytes of a contiguous CPU tensor are passed on without a copy: do not modify it until the file is closed.
    Anything else (strided, on an accelerator) is staged in chunks.

    Args:
        file: where the bytes go.
        tensors: dense tensors by name, of the dtypes in `DTYPE_NAMES`.
        metadata: strings by name, stored in the header.
        offsets: for a tensor that is a shard of a larger one, the index of its first element in the full tensor.
        full_shapes: shapes of the full tensors, to check the shards against.

    Raises:
        UnsupportedStateError: for anything the format cannot hold; nothing is written.
        CheckpointError: for a shard that exceeds its full tensor; nothing is written.
    """
    described = dict(metadata or {})
    if offsets is not None or full_shapes is not None:
        described.update(sharding_metadata(tensors, offsets or {}, full_shapes or {}))
    file.write(build_header(tensors, described))
    for buffer in _joined(_buffers(tensors)):
        file.write(buffer)


def _buffers(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for run in _runs([tensors[name].detach() for name in ordered_names(tensors)]):
        if len(run) > 1:
            yield from _chunks(_memory_of_run(run))
        else:
            for piece in _pieces(run[0]):
                yield from _chunks(bytes_of(piece))


def _runs(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, grouped by adjacency in memory: the copies of a snapshot form long runs."""
    run: list[Tensor] = []
    for tensor in tensors:
        if run and not (_is_plain(tensor) and _is_plain(run[-1]) and _are_neighbours(run[-1], tensor)):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _are_neighbours(one: Tensor, other: Tensor) -> bool:
    """Whether `other` begins where `one` ends, in the same storage."""
    storages = one.untyped_storage(), other.untyped_storage()
    is_same = storages[0].data_ptr() == storages[1].data_ptr() and storages[0].nbytes() == storages[1].nbytes()
    return is_same and other.data_ptr() == one.data_ptr() + one.nbytes


def _memory_of_run(run: list[Tensor]) -> memoryview:
    storage, size = run[0].untyped_storage(), sum(tensor.nbytes for tensor in run)
    whole = torch.empty(0, dtype=torch.uint8)
    whole.set_(storage, run[0].data_ptr() - storage.data_ptr(), (size,), (1,))
    return _memory(whole)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's bytes are in host memory in the order of its elements."""
    is_on_host = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes > 0
    return is_on_host and not tensor.is_conj() and not tensor.is_neg()


def _joined(buffers: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes, with runs of small buffers joined."""
    waiting: list[memoryview] = []
    waiting_bytes = 0
    for buffer in buffers:
        is_small = buffer.nbytes < SMALL_BYTES
        if waiting and (not is_small or waiting_bytes >= CHUNK_BYTES):
            yield b"".join(waiting)
            waiting, waiting_bytes = [], 0
        if is_small:
            waiting.append(buffer)
            waiting_bytes += buffer.nbytes
        else:
            yield buffer
    if waiting_bytes:
        yield b"".join(waiting)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Pieces of a tensor in the order of its elements; pieces that must be staged are at most one chunk."""
    if _is_plain(tensor) or tensor.nbytes <= CHUNK_BYTES:
        yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > CHUNK_BYTES:
        for row in tensor:
            yield from _pieces(row)
    else:
        yield from torch.split(tensor, CHUNK_BYTES // row_bytes)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor: its own memory if contiguous on the host, else that of a copy."""
    return _memory(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single element may have any strides and be contiguous
    return flat.view(torch.uint8).numpy().data


def _chunks(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, buffer.nbytes, WRITE_BYTES):
        yield buffer[start : start + WRITE_BYTES]


def read_header(path: str | Path) -> dict[str, TensorInfo]:
    """Dtype, shape and position of every tensor in a file, in file order; reads no tensor data.

    Args:
        path: a safetensors file.

    Raises:
        CheckpointError: for a file that is missing or not exactly a tensor file.
    """
    return read_file_header(path).tensors


def read_file_header(path: str | Path) -> TensorHeader:
    """Like `read_header`, with the metadata of the file."""
    with opened(path) as file:
        return _header_of(file, path)


def read_tensors(path: str | Path, *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All tensors of a file, in freshly allocated memory; nothing is allocated before the header is checked.

    Args:
        path: a safetensors file.
        device: the device of the tensors.

    Raises:
        CheckpointError: for a file that is missing or not exactly a tensor file.
    """
    with opened(path) as file:
        infos = _header_of(file, path).tensors
        return {name: _read_next(file, path, name, info).to(device) for name, info in infos.items()}


def opened(path: str | Path) -> BufferedReader:
    """A tensor file, to be read."""
    try:
        return open_regular_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _header_of(file: BufferedReader, path: str | Path) -> TensorHeader:
    file_size = os.fstat(file.fileno()).st_size
    length = header_length(str(path), file.read(LENGTH_BYTES), file_size)
    text = bytearray(length)
    _fill(file, path, memoryview(text))
    return parse_header(str(path), bytes(text), file_size)


def _read_next(file: BufferedReader, path: str | Path, name: str, info: TensorInfo) -> Tensor:
    tensor = torch.empty(info.shape, dtype=info.dtype)
    fill(file, path, name, tensor)
    return tensor


def fill(file: BufferedReader, path: str | Path, name: str, tensor: Tensor) -> None:
    """Read the next bytes of a tensor file into a contiguous tensor on the host, whose name is for errors."""
    memory = _memory(tensor)
    _fill(file, path, memory)
    if tensor.dtype == torch.bool and np.frombuffer(memory, np.uint8).max(initial=0) > 1:  # torch hangs in forks
        raise CheckpointError(
            f"{path} is not a tensor file: {name[:100]!r} is a bool tensor with bytes other than 0 and 1."
        )


def _fill(file: BufferedReader, path: str | Path, buffer: memoryview) -> None:
    position = 0
    while position < buffer.nbytes:
        try:
            count = file.readinto(buffer[position : position + READ_BYTES])
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the disk it is on.") from error
        if not count:
            raise CheckpointError(f"{path} ended before its last tensor; it was truncated while being read.")
        position += count
