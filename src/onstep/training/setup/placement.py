"""Places a model on its device and over the ranks of a run: the one place in which both entry points do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from onstep.config import ConfigContainer, DistributedDataParallelConfig, TrainingConfig
from onstep.config.checks import parallel
from onstep.config.suggestions import shown
from onstep.distributed import World, check_weights, data_parallel
from onstep.distributed.outcomes import together
from onstep.errors import ConfigError
from onstep.training.setup.filling import Filling, PendingWeights

Shard = Callable[[list[nn.Module], World, ConfigContainer], list[nn.Module]]


def place(
    chunks: Sequence[nn.Module],
    world: World,
    config: ConfigContainer,
    *,
    ddp: DistributedDataParallelConfig | None = None,
    compiles: bool = True,
    moves: bool = True,
    weights: PendingWeights | None = None,
    shard: Shard | None = None,
) -> list[nn.Module]:
    """The chunks as a step calls them: compiled, on the device, and wrapped for the layout of the ranks. Collective.

    Which activations are recomputed, the chunks know before: their calls of `torch.utils.checkpoint` must be
    inside of what is compiled and wrapped here.

    Args:
        chunks: the model chunks; one unless the model is split into several.
        world: the ranks of the run.
        config: the configuration of the run.
        ddp: instead of `config.ddp`.
        compiles: whether to compile as `config.train` says; False for a caller that does so for a while.
        moves: whether to move the chunks to the device of `world`; False if they are where they belong.
        weights: what the parameters are to be filled with once they are divided, if they are on `meta`.
        shard: divides the chunks in place; None for a model that is whole on every rank.

    Raises:
        ConfigError: for an unknown backend of `torch.compile`, and for weights without values.
    """
    ddp = config.ddp if ddp is None else ddp
    if is_sharded(config, world):
        return _sharded(chunks, world, config, ddp, compiles=compiles, moves=moves)
    if compiles and config.train.torch_compile:
        compile_in_place(chunks, config.train)
    if weights is None:
        check_weights(chunks)
    if shard is not None:
        filling = [] if weights is None else [Filling(chunk, weights) for chunk in chunks]
        sharded = shard(list(chunks), world, config)
        for one, chunk in zip(filling, sharded, strict=False):
            together(world, partial(one.fill, chunk, world.device), "filling the model")
        return sharded
    placed = [chunk.to(world.device) for chunk in chunks] if moves else list(chunks)
    return data_parallel(placed, world, ddp)


def is_sharded(config: ConfigContainer, world: World) -> bool:
    """Whether the model is divided between ranks, or is on the only one because `-1` asks for the rest of them.

    Args:
        config: the configuration of the run.
        world: the ranks of the run.
    """
    is_asked, sizes = config.parallel.data_parallel_shard_size != 1, world.sizes
    return is_asked and (sizes.dp_shard > 1 or (sizes.ranks == 1 and parallel.shards_are_supported))


def _sharded(
    chunks: Sequence[nn.Module],
    world: World,
    config: ConfigContainer,
    ddp: DistributedDataParallelConfig,
    *,
    compiles: bool,
    moves: bool,
) -> list[nn.Module]:
    """The chunks in shards: each block compiled by itself, since weights are gathered between two blocks."""
    from onstep.distributed.fully_sharded import blocks_of, fully_sharded  # importing DTensor costs 0.7 s

    if compiles and config.train.torch_compile:
        for chunk in chunks:
            compile_in_place(blocks_of(chunk, config.fsdp.wrap), config.train)
    check_weights(chunks)
    device = torch.device("cpu") if config.fsdp.cpu_offload else world.device
    return fully_sharded([chunk.to(device) for chunk in chunks] if moves else list(chunks), world, config, ddp)


def compile_in_place(modules: Sequence[nn.Module], train: TrainingConfig) -> None:
    """Let calls of each module run its compiled code; the modules stay the same, with their names of weights."""
    backend = train.torch_compile_backend or "inductor"
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch._dynamo.list_backends())
        raise ConfigError(f"train.torch_compile_backend={shown(backend)} is not known; use one of {known}.")
    for module in modules:
        module.compile(backend=backend, mode=train.torch_compile_mode)
