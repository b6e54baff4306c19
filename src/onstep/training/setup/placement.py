"""Places a model on its device and over the ranks of a run: the one place in which both entry points do so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from onstep.config import ConfigContainer, DistributedDataParallelConfig, TrainingConfig
from onstep.config.suggestions import shown
from onstep.distributed import World, check_weights, data_parallel
from onstep.errors import ConfigError


def place(
    chunks: Sequence[nn.Module],
    world: World,
    config: ConfigContainer,
    *,
    ddp: DistributedDataParallelConfig | None = None,
    compiles: bool = True,
    moves: bool = True,
) -> list[nn.Module]:
    """The chunks as a step calls them: compiled, on the device, and wrapped for the layout of the ranks. Collective.

    Which activations are recomputed, the chunks have been told before: their calls of `torch.utils.checkpoint` must be
    inside of what is compiled and wrapped here.

    Args:
        chunks: the model chunks; one unless the model is split into several.
        world: the ranks of the run.
        config: the configuration of the run.
        ddp: instead of `config.ddp`.
        compiles: whether to compile as `config.train` says; False for a caller that does so for a while.
        moves: whether to move the chunks to the device of `world`; False if they are where they belong.

    Raises:
        ConfigError: for an unknown backend of `torch.compile`, and for weights without values.
    """
    if compiles and config.train.torch_compile:
        compile_in_place(chunks, config.train)
    check_weights(chunks)
    placed = [chunk.to(world.device) for chunk in chunks] if moves else list(chunks)
    return data_parallel(placed, world, config.ddp if ddp is None else ddp)


def compile_in_place(modules: Sequence[nn.Module], train: TrainingConfig) -> None:
    """Let calls of each module run its compiled code; the modules stay the same, with their names of weights."""
    backend = train.torch_compile_backend or "inductor"
    if backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch._dynamo.list_backends())
        raise ConfigError(f"train.torch_compile_backend={shown(backend)} is not known; use one of {known}.")
    for module in modules:
        module.compile(backend=backend, mode=train.torch_compile_mode)
