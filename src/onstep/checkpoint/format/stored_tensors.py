"""The tensors of a stored state, whole in one file or as boxes in several: their shapes, and reading one at a time.

`open_tensors` reads the headers only. Each `StoredTensor` is then read as a whole (`read`), as a box (`read_box`), or
into memory that exists (`read_into`), which touches no more of the files than it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onstep.checkpoint.format.tensor_file import read_file_header
from onstep.checkpoint.format.tensor_header import TensorHeader, TensorInfo, sharding_of
from onstep.checkpoint.format.tensor_parts import read_part
from onstep.distributed.boxes import Box, overlapping, whole_box
from onstep.errors import CheckpointError

STEP_KEY = "step"
"""The metadata of a file of boxes: the step (optimizer updates) that they are of."""


@dataclass(frozen=True)
class StoredPart:
    """A box of a tensor in a file."""

    box: Box
    """Where it lies in the tensor."""
    path: Path
    """The tensor file."""
    info: TensorInfo
    """The entry of the file's header."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the files of a checkpoint."""

    name: str
    """In the files."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    parts: tuple[StoredPart, ...]
    """Together they are the whole tensor, and none overlaps another."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The whole tensor, in newly allocated CPU memory."""
        return self.read_box(whole_box(self.shape))

    def read_box(self, box: Box) -> Tensor:
        """A part of the tensor, in newly allocated CPU memory.

        Args:
            box: within the tensor's shape.
        """
        tensor = torch.empty(box.sizes, dtype=self.dtype)
        self.read_into(tensor, box)
        return tensor

    def read_into(self, destination: Tensor, box: Box) -> None:
        """Read a part of the tensor into memory that exists.

        Args:
            destination: a plain tensor of the box's shape; of another dtype, it gets the values converted.
            box: within the tensor's shape.

        Raises:
            CheckpointError: if a file cannot be read.
        """
        for part in self.parts:
            common = part.box.overlap(box)
            if common is not None:
                into = common.seen_from(box.offsets).of(destination)
                read_part(part.path, self.name, part.info, common.seen_from(part.box.offsets), into)


def open_tensors(paths: Iterable[Path], step: int | None = None) -> dict[str, StoredTensor]:
    """The tensors of a state, by their names in its files; no values are read.

    Args:
        paths: its tensor files.
        step: the step that files of boxes must be of; None to accept any.

    Raises:
        CheckpointError: for a file that is missing or damaged, or of another step, and for tensors whose boxes differ
            in dtype or shape, overlap, or leave a part of the tensor out.
    """
    parts: dict[str, list[StoredPart]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        header, sharding = _described(path)
        of = header.metadata.get(STEP_KEY)
        if step is not None and of is not None and of != str(step):
            raise CheckpointError(
                f"{path} is of step {of[:20]}, but its checkpoint is of step {step}; put back the file that was saved "
                f"with it, or use another checkpoint."
            )
        for name, info in header.tensors.items():
            offsets, full = sharding.get(name, ((0,) * len(info.shape), info.shape))
            box = Box(offsets, info.shape)
            parts.setdefault(name, []).append(StoredPart(box, path, info))
            shape = full or tuple(at + size for at, size in zip(*box, strict=True))
            known = shapes.setdefault(name, shape)
            if full is None and len(known) == len(shape):
                shapes[name] = tuple(map(max, known, shape))
            elif known != full:
                raise CheckpointError(
                    f"{path}: {name[:100]!r} is a part of a tensor of shape {list(shape)}, but of one of {list(known)} "
                    f"in {parts[name][0].path.name}; use another checkpoint."
                )
    return {name: joined(name, shapes[name], tuple(of_it)) for name, of_it in parts.items()}


def _described(path: Path) -> tuple[TensorHeader, dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]]]:
    """The header of a file, and where its tensors are in those that they are parts of."""
    try:
        header = read_file_header(path)
        return header, sharding_of(str(path), header)
    except CheckpointError as error:
        why = str(error).removesuffix(".")
        raise CheckpointError(f"{why}; put back the file that was saved, or use another checkpoint.") from error


def joined(name: str, shape: tuple[int, ...], parts: tuple[StoredPart, ...]) -> StoredTensor:
    first, short = parts[0], name[:100]
    for part in parts:
        if part.info.dtype != first.info.dtype:
            raise CheckpointError(
                f"{part.path}: {short!r} is of {part.info.dtype}, but of {first.info.dtype} in {first.path.name}; use "
                f"another checkpoint."
            )
    boxes = [part.box for part in parts]
    both = overlapping(boxes)
    if both is not None:
        files = sorted({part.path.name for part in parts if part.box in both})
        raise CheckpointError(
            f"{first.path.parent}: the parts {both[0]} and {both[1]} of {short!r} overlap ({', '.join(files)}); each "
            f"element must be stored once: use another checkpoint."
        )
    lacking = math.prod(shape) - sum(box.numel for box in boxes)
    if lacking:
        there = ", ".join(str(box) for box in boxes[:4]) + (", ..." if len(boxes) > 4 else "")
        raise CheckpointError(
            f"{first.path.parent}: {lacking} of the {math.prod(shape)} elements of {short!r} are missing; its files "
            f"have {there} of {list(shape)}: put back the file that has them, or use another checkpoint."
        )
    return StoredTensor(name, first.info.dtype, shape, parts)
