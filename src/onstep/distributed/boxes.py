"""Boxes: the rectangular parts of a tensor that ranks hold, and that files have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from onstep.distributed.shards import as_dtensor


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    """The index of its first element in the whole tensor."""
    sizes: tuple[int, ...]
    """Its shape."""

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements that both have; None if there are none."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        ends = [min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(tuple(starts), sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, origin: Sequence[int]) -> Box:
        """The same elements, with their index counted from `origin`."""
        return Box(tuple(at - start for at, start in zip(self.offsets, origin, strict=True)), self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of a whole tensor, as a view."""
        return tensor[tuple(slice(at, at + size) for at, size in zip(*self, strict=True))]

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape has all of its elements."""
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        return all(at >= 0 and at + size <= whole for at, size, whole in zip(*self, shape, strict=True))

    def first_in(self, shape: Sequence[int]) -> int:
        """The position of its first element in a whole tensor of that shape, row by row."""
        position = 0
        for at, size in zip(self.offsets, shape, strict=True):
            position = position * size + at
        return position

    def is_one_run_in(self, shape: Sequence[int]) -> bool:
        """Whether its elements follow each other in a whole tensor of that shape."""
        cut = next((dim for dim, size in enumerate(self.sizes) if size > 1), 0)
        return self.sizes[cut + 1 :] == tuple(shape[cut + 1 :])

    def __str__(self) -> str:
        return f"[{', '.join(f'{at}:{at + size}' for at, size in zip(*self, strict=True))}]"


def whole_box(shape: Iterable[int]) -> Box:
    """All of a tensor of that shape."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def box_of(tensor: Tensor) -> Box | None:
    """The part of `tensor` that this rank holds; None for a DTensor of other ranks only."""
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return whole_box(tensor.shape)
    if dtensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = dtensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # as torch's planner does
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that have elements in common, if any do."""
    in_order = sorted(box for box in boxes if box.numel)
    if len({(box.offsets[1:], box.sizes[1:]) for box in in_order}) == 1:  # rows: neighbors say it all
        pairs = list(pairwise(in_order))
    else:
        pairs = [(one, other) for i, one in enumerate(in_order) for other in in_order[i + 1 :]]
    return next(((one, other) for one, other in pairs if one.overlap(other) is not None), None)
