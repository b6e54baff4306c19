"""Keeps the random numbers of ranks that read the same samples equal."""

from __future__ import annotations

import torch

from onstep.distributed.world import World


def draw_alike(world: World) -> None:
    """Give torch's generator of the CPU the state that it has on the first rank that reads the same samples.

    Ranks that divide tensors, and stages of a pipeline, draw from one stream; a checkpoint of another layout has it for
    some of them only. Collective.

    Args:
        world: the ranks of the run.
    """
    if world.size > world.data.size:
        states = world.gather(torch.get_rng_state())
        readers = [world.sizes.data_rank(rank) for rank in range(world.size)]
        torch.set_rng_state(states[readers.index(world.data.rank)])
