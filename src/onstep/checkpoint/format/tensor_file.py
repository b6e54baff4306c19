"""Tensors in one safetensors file: streamed out in bounded memory, read back only after every bound was checked.

Other programs read these files too: `safetensors.torch.load_file`, and `HuggingFaceStorageReader` of
torch.distributed.checkpoint, which shards and reshards them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from onstep.checkpoint.format.tensor_header import (
    LENGTH_BYTES,
    TensorInfo,
    build_header,
    header_length,
    ordered_names,
    parse_header,
    sharding_metadata,
)
from onstep.errors import CheckpointError

__all__ = ["BinaryWriter", "FileDigest", "TensorInfo", "read_header", "read_tensors", "write_tensors"]

CHUNK_BYTES = 8 * 1024**2
"""What is staged at a time."""
WRITE_BYTES = 64 * 1024**2
"""What is handed over at a time: each hand-over waits for Python's lock, which a training loop is loath to give."""
SMALL_BYTES = 256 * 1024
"""Tensors below this are joined before they are written: an optimizer has thousands of them."""
READ_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class FileDigest:
    """What a manifest says about a file."""

    size: int
    """Bytes."""
    blake3: str
    """64 hexadecimal digits."""


class BinaryWriter(Protocol):
    """Takes the bytes of a file in order; it may keep a buffer after the call, the writer of tensors reuses none."""

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
    """Write one tensor file; memory beyond the tensors themselves stays at a few chunks.

    The bytes of a contiguous CPU tensor are handed over as they lie, without a copy: leave it alone until the file is
    closed. Anything else (strided, on an accelerator) is staged in chunks.

    Args:
        file: where the bytes go.
        tensors: by name, dense, of the dtypes in `DTYPE_NAMES`.
        metadata: text by name, kept in the header.
        offsets: for a tensor that is a part of a larger one, its first element's index in the full tensor.
        full_shapes: the full tensors' shapes, to check the parts against.

    Raises:
        UnsupportedStateError: for what the format cannot hold; nothing was written.
        CheckpointError: for a part that does not lie in its full tensor; nothing was written.
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
    """The tensors in order; neighbours in one piece of memory come together, as the copies of a snapshot do."""
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
    """Whether the tensor's bytes lie in host memory in the order of its elements."""
    is_on_host = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes > 0
    return is_on_host and not tensor.is_conj() and not tensor.is_neg()


def _joined(buffers: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes; runs of small buffers become one."""
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
    """Parts of a tensor in the order of its elements; those that must be staged are of one chunk at most."""
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
    """The bytes of a tensor: its own memory if that is plain, else that of a copy."""
    return _memory(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _chunks(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, buffer.nbytes, WRITE_BYTES):
        yield buffer[start : start + WRITE_BYTES]


def read_header(path: str | Path) -> dict[str, TensorInfo]:
    """Dtype, shape and place of every tensor of a file, in the file's order; no tensor is read.

    Raises:
        CheckpointError: for a file that is missing or not exactly a tensor file.
    """
    with _opened(path) as file:
        return _header_of(file, path)


def read_tensors(path: str | Path, *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """All tensors of a file, in memory of their own; nothing is allocated before the header was checked.

    Raises:
        CheckpointError: for a file that is missing or not exactly a tensor file.
    """
    with _opened(path) as file:
        infos = _header_of(file, path)
        return {name: _read_next(file, path, name, info).to(device) for name, info in infos.items()}


def read_tensor(path: str | Path, name: str, info: TensorInfo) -> Tensor:
    """One tensor of a file, as `read_header` describes it; raises as `read_tensors`."""
    with _opened(path) as file:
        file.seek(info.start)
        return _read_next(file, path, name, info)


def _opened(path: str | Path) -> FileIO:
    """The file, if it is a regular one: neither a link, which may lead anywhere, nor a pipe, which would block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "it is a symbolic link" if Path(path).is_symlink() else error.strerror
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return FileIO(descriptor, "r")
    os.close(descriptor)
    raise CheckpointError(f"{path} is no tensor file: it is not a regular file.")


def _header_of(file: FileIO, path: str | Path) -> dict[str, TensorInfo]:
    file_size = os.fstat(file.fileno()).st_size
    length = header_length(str(path), file.read(LENGTH_BYTES), file_size)
    text = bytearray(length)
    _fill(file, path, memoryview(text))
    return parse_header(str(path), bytes(text), file_size)


def _read_next(file: FileIO, path: str | Path, name: str, info: TensorInfo) -> Tensor:
    tensor = torch.empty(info.shape, dtype=info.dtype)
    _fill(file, path, _memory(tensor))
    if info.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
        raise CheckpointError(
            f"{path} is no tensor file: {name[:100]!r} is of bools, but has bytes other than 0 and 1."
        )
    return tensor


def _fill(file: FileIO, path: str | Path, buffer: memoryview) -> None:
    position = 0
    while position < buffer.nbytes:
        try:
            count = file.readinto(buffer[position : position + READ_BYTES])
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the disk it lies on.") from error
        if not count:
            raise CheckpointError(f"{path} ended before its last tensor; it was cut while it was read.")
        position += count
