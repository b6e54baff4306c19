"""The layouts and variants of the table of layouts, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How the ranks of a row hold the model."""

    ranks: int
    keys: tuple[str, ...] = ()
    """Overrides of the configuration."""


def _sharded(ranks: int, *keys: str, replicas: int = 1) -> Layout:
    size = (
        f"parallel.data_parallel_replicate_size={replicas}",
        f"parallel.data_parallel_shard_size={ranks // replicas}",
    )
    return Layout(ranks, (*size, *keys))


LAYOUTS = {
    "one": Layout(1),
    "ddp2": Layout(2),
    "ddp2 each": Layout(2, ("ddp.sync_each_micro_batch=true",)),
    "ddp4": Layout(4),
    "fsdp2": _sharded(2),
    "fsdp4": _sharded(4),
    "fsdp2 keep": _sharded(2, "fsdp.reshard_after_forward=false"),
    "fsdp4 in twos": _sharded(4, "fsdp.reshard_after_forward=2"),
    "fsdp2 last": _sharded(2, "ddp.sync_each_micro_batch=false"),
    "fsdp2 prefetch": _sharded(2, "fsdp.prefetch=2"),
    "hsdp 2x2": _sharded(4, replicas=2),
    "fsdp2 offload": _sharded(2, "fsdp.cpu_offload=true"),
    "fsdp2 checkpointed": _sharded(2, "model.recompute_granularity=full"),
    "fsdp2 compiled": _sharded(2, "train.torch_compile=true"),
    "fsdp2 bf16": _sharded(2, "mixed_precision=bf16_mixed"),
}


@dataclass(frozen=True)
class Variant:
    """What is trained: a model and the data of its steps."""

    model: str = "own"
    """own | llama | gpt2"""
    keys: tuple[str, ...] = ()
    """Overrides of the configuration."""
    accumulation: int = 1
    """Micro-batches of a step on each rank."""
    has_empty_rank: bool = False
    """Whether the last rank of four, or what is its share with fewer, has no labels."""
    groups: bool = False
    """Two groups of the optimizer, and a frozen embedding."""
    lora: bool = False
    same_micro_batches: bool = False
    """Whether one process takes the micro-batches that the ranks take, as a loss of each micro-batch requires."""
    dtype: str = "float32"
    door: str = "train"
    """train | pretrain (our transformer on a text of its own) | Trainer"""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the configuration of a model of transformers."""


VARIANTS = {
    "plain": Variant(),
    "accumulated": Variant(accumulation=3),
    "unclipped": Variant(keys=("optimizer.clip_grad=0",)),
    "an empty rank": Variant(has_empty_rank=True, accumulation=3),
    "tied": Variant(keys=("model.share_embeddings_and_output_weights=true",)),
    "groups": Variant(groups=True),
    "lora": Variant(lora=True),
    "dropout": Variant(keys=("model.hidden_dropout=0.1",)),
    "moe": Variant(keys=("model.num_moe_experts=4", "model.moe_aux_loss_coeff=0.01"), same_micro_batches=True),
    "float64": Variant(dtype="float64"),
    "llama": Variant("llama", accumulation=3),
    "llama tied": Variant("llama", options={"tie_word_embeddings": True}),
    "gpt2": Variant("gpt2"),
    "pretrain": Variant(door="pretrain", accumulation=3),
    "muon": Variant(door="pretrain", keys=("optimizer.optimizer=muon",)),
    "Trainer": Variant("llama", door="Trainer", accumulation=3),
}
