"""Shares results among the ranks of one worker: rank 0 talks to the server, and the others receive from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from onstep.distributed.refusals import exchanges
from onstep.distributed.world import World
from onstep.errors import ConfigError, OnstepError, text_of

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


def world_of_site(across: ProcessGroup | str, chunks: Sequence[nn.Module]) -> World:
    """The ranks of a site: those of the process group, or this one if each of them is a site. Collective.

    Args:
        across: the group of one rank of each site, or where it is met.
        chunks: the model.

    Raises:
        ConfigError: for a group of some ranks of the process group, or gradients that sites would exchange.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    known = None if isinstance(across, str) or ranks == 1 else _size_if_known(across)
    if known is None:
        return open_world()
    if known != ranks:
        raise ConfigError(
            f"a group of {known} of the {ranks} ranks of the process group does not say which ranks are a site; pass "
            f"what onstep.diloco.divide_into_sites({known}) returns."
        )
    if any(exchanges(module) for chunk in chunks for module in chunk.modules()):
        raise ConfigError(
            f"each of the {ranks} ranks is a site, but the model exchanges gradients between them at every step; pass "
            f"the model without a wrapper, or call onstep.diloco.divide_into_sites({ranks}) first in the program, and "
            f"pass the group that it returns."
        )
    return World()


def _size_if_known(group: ProcessGroup) -> int | None:
    """The size of a group of ranks of the default group; None for a group of its own."""
    try:
        return len(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return None


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
