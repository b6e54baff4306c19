"""Declares the keys of the section `parallel`, the number of ranks along each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from onstep.config.parallel_sizes import ParallelSizes
from onstep.config.section import SAFE, Bound, ConfigSection, option
from onstep.errors import ConfigError

_MOST = 1 << 20
_REST = Bound(f"-1 (the rest of the ranks), or 1 to {_MOST:,}", lambda size: size == -1 or 1 <= size <= _MOST)
_ONLY = " Only {} is supported."

_AXES = (
    "pipeline_model_parallel_size",
    "data_parallel_replicate_size",
    "data_parallel_shard_size",
    "context_parallel_size",
    "tensor_model_parallel_size",
)
"""The sizes whose product is the number of ranks, in the order of `ParallelSizes`."""
_REST_OF_RANKS = -1
_REPLICATE = "data_parallel_replicate_size"
_AS_KEYS: Mapping[str, str] = MappingProxyType({})


@dataclass
class ParallelConfig(ConfigSection):
    """The number of ranks along each axis; the product of the sizes is the number of ranks."""

    data_parallel_replicate_size: int = option(
        -1,
        SAFE,
        bound=_REST,
        known_as=("dp_replicate_size",),
        help="Number of replicas of the model, each with samples of its own; -1 is what the other sizes leave of the "
        "ranks, or 1 if data_parallel_shard_size is -1 too.",
    )
    data_parallel_shard_size: int = option(
        1,
        SAFE,
        bound=_REST,
        known_as=("dp_shard_size",),
        help="Number of ranks between which torch's FSDP2 divides one replica (section `fsdp`), each with "
        "samples of its own; -1 is what the other sizes leave of the ranks.",
    )
    tensor_model_parallel_size: int = option(
        1,
        SAFE,
        bound="> 0",
        known_as=("tp_size",),
        help="Number of ranks that divide the tensors of each layer; they have the same samples.",
    )
    pipeline_model_parallel_size: int = option(
        1,
        SAFE,
        bound="> 0",
        known_as=("pp_size",),
        help="Number of ranks of a pipeline, each with some of the layers.",
    )
    virtual_pipeline_model_parallel_size: int | None = option(
        None,
        SAFE,
        bound="> 0",
        needs="parallel.pipeline_model_parallel_size other than 1",
        help="Number of stages on each rank of a pipeline; null for one, or two in a V.",
    )
    pipeline_schedule: str | None = option(
        None,
        SAFE,
        needs="parallel.pipeline_model_parallel_size other than 1",
        help="Order of a pipeline's passes: `1F1B` or `GPipe`; with several stages on each rank `Interleaved1F1B`, "
        "`LoopedBFS` or `InterleavedZeroBubble`; with two, in a V, `ZBVZeroBubble` or `DualPipeV`. null is `1F1B`, or "
        "`Interleaved1F1B` for several stages.",
    )
    pipeline_model_parallel_layout: list[int] | None = option(
        None,
        SAFE,
        needs="parallel.pipeline_model_parallel_size other than 1",
        help="Number of layers of each stage of a pipeline, in their order; null for as many on each.",
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False,
        SAFE,
        needs="parallel.pipeline_model_parallel_size other than 1",
        help="Count the embedding as a layer of the first stage, where stages are equal.",
    )
    account_for_loss_in_pipeline_split: bool = option(
        False,
        SAFE,
        needs="parallel.pipeline_model_parallel_size other than 1",
        help="Count the output matrix and the loss as a layer of the last stage, where stages are equal.",
    )
    context_parallel_size: int = option(
        1,
        SAFE,
        bound="> 0",
        known_as=("cp_size",),
        help="Number of ranks that divide the sequences of a micro-batch." + _ONLY.format(1),
    )
    expert_model_parallel_size: int = option(
        1,
        SAFE,
        bound="> 0",
        known_as=("ep_size",),
        help="Number of ranks that divide the experts of each layer, among those that the sizes of data and context "
        "parallelism count." + _ONLY.format(1),
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        SAFE,
        bound="> 0",
        help="Number of ranks that divide the tensors of each expert; null is tensor_model_parallel_size."
        + _ONLY.format("null or 1"),
    )
    sequence_parallel: bool = option(
        False,
        SAFE,
        help="Divide the activations outside of matrix products between tensor-parallel ranks, along the sequence.",
    )

    @property
    def least_ranks(self) -> int:
        """The least number of ranks that the sizes allow."""
        return math.prod(max(1, getattr(self, name)) for name in _AXES)

    def sizes(self, ranks: int, names: Mapping[str, str] = _AS_KEYS) -> ParallelSizes:
        """The sizes of all axes, with -1 replaced by what the others leave of the ranks.

        Args:
            ranks: the number of ranks, which are the processes of a run.
            names: what the user calls a key, for messages; a key that is not there has its own name.

        Raises:
            ConfigError: with the arithmetic, for sizes that do not make up the ranks.
        """

        def named(axis: str) -> str:
            return names.get(f"parallel.{axis}", f"parallel.{axis}")

        sizes = {name: int(getattr(self, name)) for name in _AXES}
        rest = [name for name, size in sizes.items() if size == _REST_OF_RANKS]
        if len(rest) > 1:  # shards have the rest, for one replica
            sizes[_REPLICATE] = 1
            rest.remove(_REPLICATE)
        given = [f"{named(name)}={size}" for name, size in sizes.items() if size not in (1, _REST_OF_RANKS)] or [
            f"{named(name)}=1" for name in (_REPLICATE, "data_parallel_shard_size")
        ]
        product = self.least_ranks
        arithmetic = " * ".join(given) + (f" = {product}" if len(given) > 1 else "")
        there = f"{ranks} rank{'s' if ranks > 1 else ''}"
        if rest and ranks % product:
            raise ConfigError(
                f"{arithmetic} does not divide the {there} of this run; start a multiple of {product} ranks, or "
                f"change the sizes."
            )
        if not rest and product != ranks:
            raise ConfigError(
                f"{arithmetic} must be the number of ranks, but this run has {there}; start {product}, or set "
                f"{named(_REPLICATE)}=-1, which is the rest of the ranks."
            )
        pp, replicate, shard, cp, tp = (ranks // product if size == _REST_OF_RANKS else size for size in sizes.values())
        found = ParallelSizes(pp, replicate, shard, cp, tp, self.expert_model_parallel_size)
        if found.data * found.cp % found.ep:
            raise ConfigError(
                f"{named(_REPLICATE)}={replicate} * {named('data_parallel_shard_size')}={shard} * "
                f"{named('context_parallel_size')}={cp} = {found.data * found.cp} must be a multiple of "
                f"{named('expert_model_parallel_size')}={found.ep}: experts are divided among these ranks; change the "
                f"sizes."
            )
        return found
