"""Digests weights so that shards add up: a sum over their elements, each mixed with its position in the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep.distributed import World
from onstep.distributed.boxes import Box, box_of, whole_box
from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.shards import as_dtensor, local_part, split_of
from onstep.events.context import unwrap

_AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = {"cpu": 1 << 15}
"""Elements that are mixed at a time: on the CPU so many that they stay in its cache."""
_BLOCK_ELSEWHERE = 1 << 22
_OF_WORD, _OF_POSITION, _FIRST, _SECOND = (
    -7046029254386353131,
    -4417276706812531889,
    6364136223846793005,
    -7723592293110705685,
)
"""Odd factors modulo 2^64."""


@dataclass(frozen=True)
class LocalSums:
    """What this rank knows of a fingerprint: integers modulo 2^64, as PyTorch's int64."""

    counted: int = 0
    """The sum over the elements whose first copy this rank holds: those of all ranks add up to the fingerprint."""
    plain: int = 0
    """The sum over the elements of tensors that all ranks hold."""
    sharded: int = 0
    """The sum over the elements of shards, and of stages."""
    boxes: int = 0
    """Which parts these are; ranks with equal `boxes` hold replicas of each other."""


def local_sums(tensors: Iterable[Tensor], world: World, starts: Sequence[int] | None = None) -> LocalSums:
    """This rank's part of the fingerprint of a model; reads the device once.

    Args:
        tensors: plain ones and DTensors, in the same order on all ranks; those marked as `shared` another one counts.
        world: the ranks that hold them.
        starts: the position of each in the whole model, where ranks hold stages of it; None where each holds all, one
            after the other.
    """
    firsts = set(world.parts("pp")[0])
    end, boxes, sums, marks = 0, [], [], []
    for number, tensor in enumerate(tensors):
        start = end if starts is None else starts[number]
        box, is_dtensor = box_of(tensor) or whole_box((0,) * tensor.dim()), as_dtensor(tensor) is not None
        is_part = is_dtensor or starts is not None
        if is_part:
            boxes.append((start, *box))
        holders = split_of(tensor).plane() if is_dtensor else {world.rank}
        sums.append(_sum(local_part(tensor.detach()), box, tensor.shape, start))
        is_counted = min(holders) in firsts and not getattr(tensor, "shared", False)
        marks.append((is_counted, not is_part, is_part))
        end += tensor.numel()
    if not sums:
        return LocalSums()
    found = torch.stack(sums).cpu()
    counted, plain, sharded = (int((found * of).sum()) for of in torch.tensor(marks, dtype=torch.int64).T)
    return LocalSums(counted, plain, sharded, hash(tuple(boxes)) if boxes else 0)


def placed_parameters(chunks: Sequence[nn.Module]) -> tuple[list[nn.Parameter], list[int] | None]:
    """The parameters of a model, each once, and the `starts` of `local_sums`.

    Args:
        chunks: the model chunks.
    """
    bare = [unwrap(chunk) for chunk in chunks]
    names = {parameter: name for chunk in bare for name, parameter in chunk.named_parameters()}
    if not is_staged(chunks):
        return [*names], None
    starts, end = dict[str, int](), 0
    for name, shape in bare[0].whole_shapes.items():
        starts[name], end = end, end + math.prod(shape)
    return [*names], [starts[name] for name in names.values()]


def fingerprint(tensors: Iterable[Tensor], world: World | None = None, starts: Sequence[int] | None = None) -> str:
    """A digest of the bits of whole tensors, the same in every layout of the same bits. Collective: one sum.

    A differing bit changes it, barring collisions that a forger could make.

    Args:
        tensors: plain ones and DTensors, in the same order on all ranks; a replica counts once.
        world: the ranks that hold them; None is this process alone.
        starts: see `local_sums`.
    """
    world = world or World()
    counted = torch.tensor([local_sums(tensors, world, starts).counted])
    return hexadecimal(int(world.reduce(counted, dist.ReduceOp.SUM, "sum of fingerprints", world.control_group)))


def hexadecimal(word: int) -> str:
    """An integer modulo 2^64, in 16 digits."""
    return f"{word % 2**64:016x}"


def _sum(local: Tensor, box: Box, shape: torch.Size, start: int) -> Tensor:
    """The sum over the elements of a box of a tensor, on their device; `start` is the position of the whole tensor."""
    words = local.contiguous().flatten().view(_AS_INTEGER.get(local.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for mine, positions in _positions(box, shape, words, start):
        mixed = mine.to(torch.int64).mul_(_OF_WORD).add_(positions, alpha=_OF_POSITION)
        mixed.bitwise_xor_(mixed >> 32).mul_(_FIRST)
        total += mixed.bitwise_xor_(mixed >> 29).mul_(_SECOND).sum()
    return total


def _positions(box: Box, shape: torch.Size, words: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The words in blocks, with the position of each in the whole model."""
    block, is_one_run = _BLOCK.get(words.device.type, _BLOCK_ELSEWHERE), box.is_one_run_in(shape)
    for begin in range(0, len(words), block):
        mine = words[begin : begin + block]
        first = begin + (start + box.first_in(shape) if is_one_run else 0)
        index = torch.arange(first, first + len(mine), device=words.device)
        yield mine, index if is_one_run else _position(index, box, shape).add_(start)


def _position(index: Tensor, box: Box, shape: torch.Size) -> Tensor:
    """The positions in the whole tensor of elements of a box, by their positions in it."""
    found, stride = torch.zeros_like(index), 1
    for size, of_whole, offset in zip(reversed(box.sizes), reversed(shape), reversed(box.offsets), strict=True):
        found += (index % size + offset) * stride
        index, stride = index // size, stride * of_whole
    return found
