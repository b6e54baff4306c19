"""Places a model on its device and over the ranks of a run: the one place in which both entry points do so."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from onstep.config import ConfigContainer, DistributedDataParallelConfig, TrainingConfig
from onstep.config.suggestions import shown
from onstep.distributed import World, check_ranks, check_weights, data_parallel
from onstep.distributed.buffered import buffered_data_parallel
from onstep.distributed.outcomes import together
from onstep.distributed.pipeline.seats import is_staged
from onstep.errors import ConfigError
from onstep.training.setup.filling import Filling, PendingWeights


def place(
    chunks: Sequence[nn.Module],
    world: World,
    config: ConfigContainer,
    *,
    ddp: DistributedDataParallelConfig | None = None,
    compiles: bool = True,
    moves: bool = True,
    weights: PendingWeights | None = None,
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
        weights: what the parameters are filled with once they are divided; None if they have values.

    Raises:
        ConfigError: for an unknown backend of `torch.compile`, and for weights without values.
    """
    ddp = config.ddp if ddp is None else ddp
    if world.sizes.tp > 1:
        return _in_tensors(list(chunks), world, config, ddp, weights=weights)
    if is_sharded(config, world):
        return _sharded(list(chunks), world, config, ddp, compiles=compiles, weights=weights)
    if compiles and config.train.torch_compile:
        compile_in_place(chunks, config.train)
    check_weights(chunks)
    placed = [chunk.to(world.device) for chunk in chunks] if moves else list(chunks)
    if is_staged(placed):  # their engine sums the gradients of replicas
        return placed
    if config.ddp.use_distributed_optimizer and (world.data.size > 1 or ddp.fp8_param_gather):
        check_ranks(placed, world)
        return buffered_data_parallel(placed, world, ddp)
    return data_parallel(placed, world, ddp)


def _in_tensors(
    chunks: list[nn.Module],
    world: World,
    config: ConfigContainer,
    ddp: DistributedDataParallelConfig,
    *,
    weights: PendingWeights | None,
) -> list[nn.Module]:
    """The chunks with the tensors of each layer divided, and then, with several ranks of data, their parts."""
    from onstep.distributed.fully_sharded import fully_sharded  # importing DTensor costs 0.7 s
    from onstep.training.setup.tensor_division import divide_tensors

    if weights is None:
        check_weights(chunks)
    filling = [] if weights is None else [Filling(chunk, weights) for chunk in chunks]
    for chunk in chunks:
        divide_tensors(chunk, world, config)
    is_sharded_too = world.data.size > 1 and not config.ddp.use_distributed_optimizer
    if is_sharded_too:
        chunks = fully_sharded(chunks, world, config, ddp)
    device = torch.device("cpu") if config.fsdp.cpu_offload and is_sharded_too else world.device
    for one, chunk in zip(filling, chunks, strict=False):
        together(world, partial(one.fill, chunk, device), "filling the model")
    if is_sharded_too:
        return chunks
    chunks = [chunk.to(world.device) for chunk in chunks]
    return buffered_data_parallel(chunks, world, ddp) if world.data.size > 1 else chunks


def is_divided(config: ConfigContainer, world: World) -> bool:
    """Whether no rank has the whole model: it is in shards, or its tensors are divided.

    Args:
        config: the configuration of the run.
        world: the ranks of the run.
    """
    return world.sizes.tp > 1 or is_sharded(config, world)


def is_sharded(config: ConfigContainer, world: World) -> bool:
    """Whether the model is divided between ranks, or is on the only one because the rest of the ranks is asked for.

    Args:
        config: the configuration of the run.
        world: the ranks of the run.
    """
    return config.parallel.data_parallel_shard_size != 1 and (world.sizes.dp_shard > 1 or world.size == 1)


def _sharded(
    chunks: list[nn.Module],
    world: World,
    config: ConfigContainer,
    ddp: DistributedDataParallelConfig,
    *,
    compiles: bool,
    weights: PendingWeights | None,
) -> list[nn.Module]:
    """The chunks in shards: each block compiled by itself, since weights are gathered between two blocks.

    `fully_shard` moves the values that there are to the device, block by block.
    """
    from onstep.distributed.fully_sharded import fully_sharded  # importing DTensor costs 0.7 s

    if compiles and config.train.torch_compile:
        for chunk in chunks:
            compile_in_place(compiled_parts(chunk, config, world), config.train)
    if weights is None:
        check_weights(chunks)
        return fully_sharded(chunks, world, config, ddp)
    filling = [Filling(chunk, weights) for chunk in chunks]
    chunks = fully_sharded(chunks, world, config, ddp)
    device = torch.device("cpu") if config.fsdp.cpu_offload else world.device
    for one, chunk in zip(filling, chunks, strict=True):
        together(world, partial(one.fill, chunk, device), "filling the model")
    return chunks


def compiled_parts(chunk: nn.Module, config: ConfigContainer, world: World) -> list[nn.Module]:
    """What is compiled of a chunk: its blocks if it is divided between ranks, else all of it.

    Args:
        chunk: a model chunk.
        config: the configuration of the run.
        world: the ranks of the run.
    """
    if not is_sharded(config, world):
        return [chunk]
    from onstep.distributed.fully_sharded import blocks_of

    return blocks_of(chunk, config.fsdp.wrap)


def compile_in_place(modules: Sequence[nn.Module], train: TrainingConfig) -> None:
    """Let calls of each module run its compiled code; the modules stay the same, with their names of weights."""
    backend = train.torch_compile_backend or "inductor"
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch._dynamo.list_backends())
        raise ConfigError(f"train.torch_compile_backend={shown(backend)} is not known; use one of {known}.")
    for module in modules:
        module.compile(backend=backend, mode=train.torch_compile_mode)
