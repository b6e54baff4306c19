"""Names the parallelism that is configured but not supported: its keys, the values they must have, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LaterPart:
    """A key of the section `parallel` whose only values are those of a run without it."""

    values: tuple[Any, ...]
    """The values that it must have, its default first."""
    why: str
    """What another value asks for."""
    remedy: str
    """What to do instead."""


_SHARD = (
    "let data parallelism use the ranks; parallel.data_parallel_shard_size=-1 divides a model too large for one GPU "
    "between them"
)
LATER_PARTS = {
    "context_parallel_size": LaterPart(
        (1,),
        "context parallelism is not supported",
        "shorten model.seq_length, or save memory with model.recompute_granularity=full",
    ),
    "expert_model_parallel_size": LaterPart(
        (1,), "expert parallelism is not supported, each rank has all experts", _SHARD
    ),
    "expert_tensor_parallel_size": LaterPart(
        (None, 1),
        "experts are divided as the rest of a layer is, by parallel.tensor_model_parallel_size",
        "set it to null",
    ),
}
"""By name; the keys of Megatron Bridge's section `model` of the same names set them."""
