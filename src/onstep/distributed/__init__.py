"""The ranks of a run: the world, what ranks agree on, and data parallelism."""

from onstep.config.parallel_sizes import ParallelSizes
from onstep.distributed.data_parallel import (
    check_ranks,
    check_weights,
    data_parallel,
    has_fixed_buckets,
    is_bare,
    no_sync,
)
from onstep.distributed.data_ranks import DataRanks
from onstep.distributed.opening import existing_world, keep_world, open_world, world_size_from_environment
from onstep.distributed.outcomes import attempt, on_main, raise_together
from onstep.distributed.pg_collection import ProcessGroupCollection, check_groups, groups_within_models
from onstep.distributed.refusals import check_exchanged, check_loader, refused_together
from onstep.distributed.world import World

__all__ = [
    "DataRanks",
    "ParallelSizes",
    "ProcessGroupCollection",
    "World",
    "attempt",
    "check_exchanged",
    "check_groups",
    "check_loader",
    "check_ranks",
    "check_weights",
    "data_parallel",
    "existing_world",
    "groups_within_models",
    "has_fixed_buckets",
    "is_bare",
    "no_sync",
    "on_main",
    "keep_world",
    "open_world",
    "raise_together",
    "refused_together",
    "world_size_from_environment",
]
