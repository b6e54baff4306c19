"""Shares results among the ranks of one worker: rank 0 talks to the server, and the others receive from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed.world import World
from onstep.errors import OnstepError, text_of

S = TypeVar("S")
T = TypeVar("T")


class MainRankError(OnstepError, RuntimeError):
    """Rank 0 of this worker failed; its message says how."""


def open_world() -> World:
    """The ranks of the process group; one if there is none. Collective, as it makes a group for the CPU."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return World()
    group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return World(dist.get_rank(), dist.get_world_size(), control_group=group)


def on_main(world: World, owner: S | None, work: Callable[[S], T]) -> T:
    """The result of `work(owner)` on rank 0, on every rank; so is its error. Collective; for small results.

    Args:
        owner: an object of rank 0; None on the other ranks.

    Raises:
        MainRankError: on the other ranks, if rank 0 raised anything.
    """
    if not world.is_main:
        result, error = world.share(None)
        if error is not None:
            raise MainRankError(f"rank 0 failed: {error}")
        value: T = result
        return value
    assert owner is not None
    if world.size == 1:
        return work(owner)
    try:
        with world.main_only("the exchange with the server"):
            value = work(owner)
    except Exception as error:
        world.share((None, f"{type(error).__name__}: {text_of(error)}"))
        raise
    world.share((value, None))
    return value


def share_tensor(world: World, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rank 0's tensor, which is on the CPU, on every rank. Collective."""
    if world.size == 1:
        assert tensor is not None
        return tensor
    buffer = tensor.contiguous() if tensor is not None else torch.empty(shape, dtype=dtype)
    dist.broadcast(buffer, src=0, group=world.control_group)
    return buffer
