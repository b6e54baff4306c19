"""Joins the ranks of a run, or finds those of the existing process group, and picks each one's device."""

from __future__ import annotations

import atexit
import sys

import torch
import torch.distributed as dist

from onstep.config import DistributedInitConfig
from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed.mesh import check_sizes
from onstep.distributed.process_group import Facts, compare_ranks, control_group, join_group, leave_group, timeout_of
from onstep.distributed.world import World
from onstep.errors import ConfigError
from onstep.files.bounded_reading import integer_from_environment
from onstep.slurm.ranks import adopt_ranks


def open_world(config: DistributedInitConfig, sizes: ParallelSizes | None = None, facts: Facts | None = None) -> World:
    """Join the process group that the environment of `torchrun` or `srun` describes, or create one for one process.

    An existing process group is used as is, and not destroyed by `World.close`.

    Args:
        config: the configuration of the run.
        sizes: the number of ranks along each axis; None if each is to have samples of its own.
        facts: gives what must be the same on all ranks that have it, by name; asked where there are several.

    Raises:
        ConfigError: for a device that this machine does not have, an invalid environment, or sizes of other ranks; on
            all ranks alike, if they differ.
    """
    adopt_ranks()
    size, rank = integer_from_environment("WORLD_SIZE", 1), integer_from_environment("RANK", 0)
    local_rank = integer_from_environment("LOCAL_RANK", 0)
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    if not 0 <= rank < size:
        raise ConfigError(
            f"$RANK must be at least 0 and below $WORLD_SIZE, got rank {rank} of {size}; start the ranks with torchrun."
        )
    sizes = ParallelSizes(dp_replicate=size) if sizes is None else sizes
    check_sizes(sizes, size)  # before any group is made
    device = _device(config.device, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    owns_group, hook = not dist.is_initialized(), sys.excepthook
    if owns_group:
        join_group(config, sizes, rank, device, facts)
    elif size > 1 and facts is not None:
        compare_ranks(facts, timeout_of(config), sizes)
    try:
        minutes, decides = (
            (config.distributed_timeout_minutes if owns_group else None),
            control_group(timeout_of(config)),
        )
        world = World(rank, size, local_rank, device, owns_group, decides, minutes, sizes=sizes)
    except BaseException:
        if owns_group:
            leave_group()
        raise
    if owns_group:
        world.keep_excepthook(hook)
    return world


def keep_world(world: World) -> None:
    """Close a world of several ranks when the process ends, unless its default group has ended before.

    What a training has divided has a mesh of its groups, and is saved and evaluated after it.
    """
    atexit.register(_close_in, dist.group.WORLD, world)


def _close_in(default: object, world: World) -> None:
    if dist.group.WORLD is default:
        world.close()


def existing_world() -> World:
    """The ranks of the existing process group; one rank without a group. Collective with a backend other than gloo."""
    if not (dist.is_available() and dist.is_initialized()):
        return World(is_assumed=True)
    if dist.get_world_size() == 1:
        return World()
    on_cuda = dist.get_backend() != "gloo" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    local_rank = integer_from_environment("LOCAL_RANK", 0)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device, control_group=control_group())


def world_size_from_environment() -> int:
    """The number of ranks that `torchrun` or `srun` started; 1 without them."""
    adopt_ranks()
    return dist.get_world_size() if dist.is_initialized() else integer_from_environment("WORLD_SIZE", 1)


def _device(wanted: str | None, local_rank: int) -> torch.device:
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"dist.device={wanted} requires a CUDA GPU, but torch sees none; use dist.device=cpu.")
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"dist.device={wanted} of local rank {local_rank} is GPU {index}, but torch sees "
            f"{torch.cuda.device_count()}; start fewer ranks on this machine, or use dist.device=cpu."
        )
    return torch.device("cuda", index)
