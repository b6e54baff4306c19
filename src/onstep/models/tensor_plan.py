"""Says how the modules of a `Transformer` are divided between tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from onstep.distributed.tensor_parallel import (
    Part,
    TensorRanks,
    column,
    dropout_part,
    row,
    vocabulary_embedding,
)
from onstep.models.heads import LinearForLastLayer
from onstep.models.layers.head_share import HeadShare
from onstep.models.layers.layer import Attention, Layer
from onstep.models.sizes import num_query_groups, vocabulary_size
from onstep.models.transformer import Transformer
from onstep.models.vocabulary_share import VocabularyShare

_OF_GROUPS = ("attention.key", "attention.value")
_COLUMNS = ("attention.query", *_OF_GROUPS, "feed_forward.gate", "feed_forward.up")
_ROWS = ("attention.output", "feed_forward.down")


def plan_of(model: Transformer, ranks: TensorRanks) -> dict[str, Part]:
    """What a rank computes of each module, by name.

    Queries, keys, values, and the first matrices of feed-forward blocks are divided by outputs, so by heads; the
    matrices after them by inputs, and their results are summed. Embedding and output are divided by tokens. The rest is
    replicated.

    Args:
        model: the whole model.
        ranks: the ranks that divide it.
    """
    groups, norm = num_query_groups(model.config), Part(sums_gradients=ranks.divides_sequences)
    blocks = groups if groups < ranks.size else None
    plan = {"final_norm": Part(sums_gradients=ranks.divides_sequences, after=ranks.whole)}
    if model.position_embedding is None:
        plan["embedding"] = vocabulary_embedding(ranks, ranks.leave)
        plan["dropout"] = dropout_part(ranks, 1, lambda: ranks.are_sequences_divided)
    else:  # positions are added to whole sequences
        plan["embedding"] = vocabulary_embedding(ranks, ranks.sum)
        plan["position_embedding"] = Part()
        own = dropout_part(ranks, 1, lambda: ranks.are_sequences_divided)
        plan["dropout"] = Part(before=ranks.divided, forward=own.forward)
    for index, layer in enumerate(model.layers):
        if isinstance(layer, Layer):
            plan |= {f"layers.{index}.{name}": part for name, part in _of_layer(layer, ranks, norm, blocks)}
    if isinstance(model.output, LinearForLastLayer):
        plan["output"] = Part()
    elif model.output is not None:
        plan["output"] = column()
    return plan


def _of_layer(layer: Layer, ranks: TensorRanks, norm: Part, blocks: int | None) -> Iterator[tuple[str, Part]]:
    for region in ("attention", "feed_forward"):
        yield f"{region}_norm", norm
        yield region, Part(before=ranks.enter)
    yield "dropout", dropout_part(ranks, 1, lambda: ranks.are_sequences_divided)
    for name in ("attention.query_norm", "attention.key_norm"):
        yield name, Part(sums_gradients=True)
    for name in _ROWS:
        if (module := _found(layer, name)) is not None:
            yield from _with_adapter(name, module, ranks)
    for name in _COLUMNS:
        if (module := _found(layer, name)) is not None:
            yield from _with_adapter(name, module, ranks, column(blocks if name in _OF_GROUPS else None))


def _found(layer: Layer, name: str) -> nn.Module | None:
    found = layer
    for own in name.split("."):
        found = getattr(found, own, None)  # type: ignore[assignment]
    return found


def _with_adapter(
    name: str, module: nn.Module, ranks: TensorRanks, by_columns: Part | None = None
) -> Iterator[tuple[str, Part]]:
    """A projection, by columns or else by rows, perhaps with LoRA: `A` and `B` are divided where they meet what is."""
    base = getattr(module, "base_layer", None)
    linear, own = (module, name) if base is None else (base, f"{name}.base_layer")
    has_bias = getattr(linear, "bias", None) is not None
    yield own, by_columns or row(ranks, has_bias=has_bias)
    if base is None:
        return
    for adapter in module.lora_A:  # type: ignore[union-attr]
        first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
        yield first, Part(sums_gradients=True) if by_columns else row(ranks, has_bias=False)
        yield second, by_columns or Part(sums_gradients=ranks.divides_sequences)
        if not by_columns and isinstance(module.lora_dropout[adapter], nn.Dropout):  # type: ignore[index]
            yield f"{name}.lora_dropout.{adapter}", dropout_part(ranks, -1, lambda: True)


def share_out(model: Transformer, ranks: TensorRanks) -> None:
    """Tell a model which heads and which part of the vocabulary this rank has.

    Args:
        model: a divided model.
        ranks: the ranks that divide it.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.shares = HeadShare(ranks.rank, ranks.size)
    if not model.has_value_head:
        model.vocabulary = VocabularyShare(vocabulary_size(model.config), ranks.mesh)
