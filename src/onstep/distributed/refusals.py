"""Refuses what would train silently wrong on several ranks: worlds and loaders of other ranks, gradients left alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onstep.distributed.shards import as_dtensor, has_ranks_of, rank, world_size
from onstep.distributed.world import World
from onstep.errors import ConfigError, ShardingError
from onstep.files.bounded_reading import integer_from_environment

T = TypeVar("T")

_MARKS = ("no_sync", "set_requires_gradient_sync", "zero_grad_buffer")
"""What only modules have that exchange gradients: those of DDP, FSDP, Megatron-Core and DeepSpeed."""


def exchanges(module: nn.Module) -> bool:
    """Whether a module is a wrapper that exchanges the gradients of what is in it.

    Args:
        module: any module of a model.
    """
    return any(hasattr(type(module), mark) for mark in _MARKS)


def check_world(world: World) -> None:
    """Check that a world is the process group, or chosen to be this rank alone.

    Args:
        world: the ranks that a run knows of.

    Raises:
        ConfigError: otherwise.
    """
    ranks = world_size()
    if world.is_assumed and ranks > 1:
        raise ConfigError(
            f"the state was made before the process group of {ranks} ranks, so its world is this rank alone; "
            f"make GlobalState after the group, or pass world=World() if each rank is to train by itself."
        )
    if world.is_assumed and not dist.is_initialized() and (started := integer_from_environment("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            f"$WORLD_SIZE says that {started} ranks were started, but there is no process group, so each would train a "
            f"model of its own on the same samples; pass world=open_world(cfg.dist) to GlobalState, which joins the "
            f"group, or world=World() if each rank is to train by itself."
        )
    if world.size == 1 and world.rank == 0:
        return
    if not dist.is_initialized():
        raise ConfigError(
            f"the world is rank {world.rank} of {world.size}, but there is no process group; pass "
            f"world=open_world(cfg.dist), which joins the group, or call torch.distributed.init_process_group first."
        )
    if (world.rank, world.size) != (rank(), ranks):
        raise ConfigError(
            f"the world is rank {world.rank} of {world.size}, but this process is rank {rank()} of the {ranks} of its "
            f"process group, so samples and loss weights would be wrong; make GlobalState without world=, or pass "
            f"world=open_world(cfg.dist)."
        )


def check_loader(loader: object, world: World) -> None:
    """Check that a loader reads the samples of this rank; data without ranks is not checked.

    Args:
        loader: a loader of `onstep.data`, or any other data.
        world: the ranks of the run; alone, it may read a part of the samples.

    Raises:
        ConfigError: for a loader of other ranks.
    """
    layout = getattr(loader, "layout", None)
    read = getattr(layout, "rank", None), getattr(layout, "world_size", None)
    if None in read or world.size == 1 or read == (world.data.rank, world.data.size):
        return
    raise ConfigError(
        f"the {type(loader).__name__} reads the samples of rank {read[0]} of {read[1]}, but is read by rank "
        f"{world.data.rank} of {world.data.size}: some samples would be read twice and others never; make it with "
        f"rank=state.world.data.rank and world_size=state.world.data.size."
    )


def check_exchanged(chunks: Sequence[nn.Module], trained: Collection[Tensor] | None) -> None:
    """Check that whatever exchanges the gradients of a model over several ranks leaves no trained parameter out.

    A model in which nothing does is the user's own concern.

    Args:
        chunks: the model chunks.
        trained: the parameters of the optimizer; None if they are not known.

    Raises:
        ConfigError: for trained parameters that each rank would train by itself.
        ShardingError: for a model in torch's first FSDP.
    """
    if world_size() == 1:
        return
    ids = None if trained is None else set(map(id, trained))
    for chunk in chunks:
        check_version(chunk)
        wrappers = [module for module in chunk.modules() if exchanges(module)]
        if not wrappers:
            continue
        whole = {id(one) for module in wrappers if not _shards(module) for one in module.parameters()}
        named = [(name, one) for name, one in chunk.named_parameters() if one.requires_grad]
        alone = [
            name
            for name, one in named
            if not (as_dtensor(one) is not None or id(one) in whole or _has_hook(one))
            and (ids is None or id(one) in ids)
        ]
        if alone:
            names = ", ".join(alone[:3]) + (", ..." if len(alone) > 3 else "")
            raise ConfigError(
                f"each rank would train {len(alone)} of {len(named)} parameters by itself ({names}), since they are "
                f"outside of what averages the gradients of the rest over the ranks; wrap the whole model (with "
                f"fully_shard: the model after its blocks), freeze them, or average their gradients in a hook."
            )


def _has_hook(parameter: Tensor) -> bool:
    """Whether the user does something with its gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _shards(module: nn.Module) -> bool:
    """Whether a module is in FSDP2, whose parameters are DTensors, and those that it ignores are not."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def check_undivided(chunks: Sequence[nn.Module], what: str, along: DeviceMesh | None = None) -> None:
    """Refuse (ShardingError) a parameter that is sharded over ranks.

    Args:
        chunks: the model chunks.
        what: what is to be done with the model, and what it must be for that.
        along: a mesh over which parameters may be sharded.
    """
    for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
        dtensor = as_dtensor(parameter)
        if dtensor is not None and not (along is not None and has_ranks_of(dtensor.device_mesh, along)):
            raise ShardingError(
                f"{name} is sharded over {dtensor.device_mesh}, but the model is to be {what}; pass it without "
                f"fully_shard, or train it with onstep.training.train."
            )


def check_version(chunk: nn.Module) -> None:
    """Refuse (ShardingError) a model in torch's first FSDP.

    Args:
        chunk: a model chunk.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in chunk.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise ShardingError(
                f"{name or 'the model'} is in FullyShardedDataParallel, of whose gradients each rank sees its own part "
                f"only, so norms and clipping would be wrong; use torch.distributed.fsdp.fully_shard, or "
                f"onstep.distributed.data_parallel."
            )


def refused_together(world: World, work: Callable[[], T]) -> T:
    """The result of the work, unless it is refused (ConfigError) on any rank: then all ranks raise. Collective.

    Also at the start of a training after an error, which `World.gather` would refuse; alone where each rank trains by
    itself, or there are no others.

    Args:
        world: the ranks of the run, perhaps not those of the process group.
        work: what checks and builds, without any collective.
    """
    if world.size == 1 or world_size() == 1:
        return work()
    result, error = None, None
    try:
        result = work()
    except ConfigError as refusal:
        error = refusal
    notes: list[tuple[type[ConfigError], str] | None] = [None] * world_size()
    dist.all_gather_object(notes, None if error is None else (type(error), str(error)), group=world.control_group)
    if error is not None:
        raise error
    for number, note in enumerate(notes):
        if note is not None:
            kind, text = note
            raise kind(f"{world.place(number)}: {text}")
    return cast(T, result)
