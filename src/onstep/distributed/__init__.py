"""The ranks of a run: the world, what ranks agree on, and data parallelism."""

from onstep.distributed.data_parallel import (
    check_ranks,
    check_weights,
    data_parallel,
    has_fixed_buckets,
    is_bare,
    no_sync,
)
from onstep.distributed.world import (
    World,
    attempt,
    existing_world,
    on_main,
    open_world,
    raise_together,
    world_size_from_environment,
)

__all__ = [
    "World",
    "attempt",
    "check_ranks",
    "check_weights",
    "data_parallel",
    "existing_world",
    "has_fixed_buckets",
    "is_bare",
    "no_sync",
    "on_main",
    "open_world",
    "raise_together",
    "world_size_from_environment",
]
