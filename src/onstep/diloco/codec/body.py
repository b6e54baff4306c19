"""Makes one safetensors body of named tensors, and reads one from untrusted bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onstep.checkpoint.format.tensor_file import write_tensors
from onstep.checkpoint.format.tensor_header import (
    DTYPES_BY_NAME,
    LENGTH_BYTES,
    build_header,
    header_length,
    parse_header,
)
from onstep.diloco.codec.specs import InvalidTensorsError
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.errors import CheckpointError

_WHERE = "the body"


def write_body(tensors: Mapping[str, Tensor]) -> bytes:
    """The tensors as the bytes of a safetensors file."""
    file = io.BytesIO()
    write_tensors(file, tensors)
    return file.getvalue()


class Body:
    """The body that `write_body` makes of encoded tensors, in memory that is there before they are.

    Args:
        specs: of the encoded tensors.
    """

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        # with shapes, but without memory
        outline = {one.name: torch.empty((), dtype=DTYPES_BY_NAME[one.dtype]).expand(one.shape) for one in specs}
        header = build_header(outline, {})
        self.memory = bytearray(len(header) + sum(one.nbytes for one in outline.values()))
        self.memory[: len(header)] = header
        self.tensors = read_body(self.memory)
        """Views of the memory, to be filled."""


def body_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Length of `write_body(tensors)`, without making it."""
    return len(build_header(tensors, {})) + sum(tensor.nbytes for tensor in tensors.values())


def read_body(body: bytes | bytearray | memoryview) -> dict[str, Tensor]:
    """The tensors of a body, in its memory if that is writable, else in one copy of it; every bound is checked first.

    Raises:
        InvalidTensorsError: for anything but a complete safetensors file.
    """
    given = memoryview(body).cast("B")
    memory = memoryview(bytearray(given)) if given.readonly else given
    try:
        length = header_length(_WHERE, bytes(memory[:LENGTH_BYTES]), len(memory))
        infos = parse_header(_WHERE, bytes(memory[LENGTH_BYTES : LENGTH_BYTES + length]), len(memory)).tensors
    except CheckpointError as error:
        raise InvalidTensorsError(str(error)) from error
    return {name: _tensor(memory, info.dtype, info.shape, info.start) for name, info in infos.items()}


def _tensor(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize:  # only in a file that is not ours: torch requires aligned memory
        memory, start = memoryview(bytearray(memory[start : start + count * dtype.itemsize])), 0
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
