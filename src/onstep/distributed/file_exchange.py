"""Copies files between ranks that do not share a file system."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed.outcomes import together
from onstep.distributed.world import World


@dataclass(frozen=True)
class Transfer:
    """A file that one rank has and another one is to get."""

    name: str
    """The path of the file, relative to the directory that each rank passes."""
    size: int
    """Its number of bytes."""
    source: int
    """The rank that has it."""
    target: int
    """The rank that gets it."""


def exchange_files(world: World, directory: Path, transfers: Sequence[Transfer], doing: str) -> None:
    """Copy files between ranks, all at the same time. Collective, over gloo.

    Files are mapped into memory, and sent and received there: nothing else of their size is allocated.

    Args:
        world: the ranks; its group for decisions carries the files.
        directory: of this rank, on its own file system; existing files in it are replaced.
        transfers: the same on all ranks.
        doing: what is done, for errors.

    Raises:
        CheckpointError: on all ranks, if one has no space for its files, or cannot read them.
    """
    own = [(tag, one) for tag, one in enumerate(transfers) if world.rank in (one.source, one.target)]
    # space is allocated before anybody sends: a rank without it would let the others wait
    mapped = together(world, lambda: [_mapped(directory, one, world.rank) for _, one in own], doing)
    work = []
    for (tag, one), content in zip(own, mapped, strict=True):
        if one.size and one.source == world.rank:
            work.append(dist.isend(content, one.target, group=world.control_group, tag=tag))
        elif one.size:
            work.append(dist.irecv(content, one.source, group=world.control_group, tag=tag))
    for each in work:
        if each is not None:
            each.wait()


def _mapped(directory: Path, transfer: Transfer, rank: int) -> Tensor:
    """The content of a file in memory, as bytes; that of a new one is to be received."""
    path = directory / transfer.name
    if transfer.target == rank:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            if transfer.size:
                os.posix_fallocate(file.fileno(), 0, transfer.size)
    if not transfer.size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=True, size=transfer.size, dtype=torch.uint8)
