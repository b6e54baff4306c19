"""Declares the keys of the section `fsdp`, how a model is divided between ranks by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import SAFE, Bound, ConfigSection, option

_SHARDED = "parallel.data_parallel_shard_size other than 1"
_RESHARD = Bound(
    "true, false, or a number of ranks from 2 to 1,048,576",
    lambda value: isinstance(value, bool) or 2 <= value <= 1 << 20,
)


@dataclass
class FullyShardedConfig(ConfigSection):
    """How torch's `fully_shard` divides a model between `parallel.data_parallel_shard_size` ranks."""

    wrap: list[str] | None = option(
        None,
        SAFE,
        needs=_SHARDED,
        known_as=("transformer_layer_cls_to_wrap", "auto_wrap_policy"),
        help="Classes of the blocks whose weights are gathered together, such as `[LlamaDecoderLayer]`, or a function "
        "of the model that returns them, which only Python can set; null is what the model names "
        "(`_no_split_modules`), or else the modules in its outermost lists (`nn.ModuleList`).",
    )
    reshard_after_forward: bool | int = option(
        True,
        SAFE,
        bound=_RESHARD,
        needs=_SHARDED,
        help="Free the gathered weights of a block after its forward pass, and gather them again for the backward "
        "pass; false keeps them in between (ZeRO-2). A number, which divides the shard size, keeps them in shards of "
        "so many ranks.",
    )
    cpu_offload: bool = option(
        False,
        SAFE,
        needs=_SHARDED,
        known_as=("offload_params",),
        help="Keep the shards of weights, gradients and optimizer state in host memory, where the update runs too.",
    )
    prefetch: int = option(
        0,
        SAFE,
        bound=">= 0 and at most 1,024",
        needs=_SHARDED,
        known_as=("forward_prefetch", "backward_prefetch"),
        help="Number of blocks whose weights are gathered ahead of the one that computes, in the forward and the "
        "backward pass; 0 leaves it to torch, which gathers the next one.",
    )
