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
from onstep.models.stages import TransformerStage
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
    placed = list(chunks)
    in_stages, in_shards = is_staged(placed), _is_in_shards(placed, config, world)
    shared = [[name for name, one in chunk.named_parameters() if getattr(one, "shared", False)] for chunk in placed]
    filling = None if weights is None else Filling(placed, weights)
    if compiles and config.train.torch_compile:
        compile_in_place([part for chunk in placed for part in compiled_parts(chunk, config, world)], config.train)
    if filling is None:
        check_weights(placed)
    if world.sizes.tp > 1:
        from onstep.training.setup.tensor_division import divide_tensors  # importing DTensor costs 0.7 s

        for chunk in placed:
            divide_tensors(chunk, world, config)
    if in_shards:
        from onstep.distributed.fully_sharded import fully_sharded

        placed = fully_sharded(placed, world, config, ddp)
    if filling is not None:
        device = torch.device("cpu") if config.fsdp.cpu_offload and in_shards else world.device
        together(world, partial(filling.fill, device), "filling the model")
    if not in_shards and (moves or world.sizes.tp > 1):
        placed = [chunk.to(world.device) for chunk in placed]
    for chunk, names in zip(placed, shared, strict=True):
        for name in names:
            chunk.get_parameter(name).shared = True  # type: ignore[attr-defined]
    if in_shards:
        return placed
    is_cut = world.sizes.tp > 1 or in_stages
    if config.ddp.use_distributed_optimizer and (world.data.size > 1 or (ddp.fp8_param_gather and not is_cut)):
        if not is_cut:
            check_ranks(placed, world)
        return buffered_data_parallel(placed, world, ddp)
    return placed if is_cut else data_parallel(placed, world, ddp)  # the engine of stages sums those of replicas


def _is_in_shards(chunks: Sequence[nn.Module], config: ConfigContainer, world: World) -> bool:
    """Whether FSDP2 has the parameters; also of replicas of divided tensors, which DistributedDataParallel cannot."""
    if world.sizes.tp == 1 or is_staged(chunks):
        return is_sharded(config, world)
    return world.data.size > 1 and not config.ddp.use_distributed_optimizer


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


def compiled_parts(chunk: nn.Module, config: ConfigContainer, world: World) -> list[nn.Module]:
    """What is compiled of a chunk: its blocks if it is divided between ranks or a stage of a pipeline, else all of it.

    Args:
        chunk: a model chunk.
        config: the configuration of the run.
        world: the ranks of the run.
    """
    if isinstance(chunk, TransformerStage):
        chunk.stream.is_shared = False  # compiled code draws in an order of its own
        return [*chunk.layers]
    if not is_divided(config, world):
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
