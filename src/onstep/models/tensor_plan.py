"""Says how the modules of a `Transformer` are divided between tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from onstep.distributed.pipeline.seats import seat_of
from onstep.distributed.tensor_parallel import (
    Part,
    TensorRanks,
    column,
    dropout_part,
    row,
    vocabulary_embedding,
)
from onstep.distributed.tensor_regions import copied, counted_once
from onstep.models.heads import LinearForLastLayer
from onstep.models.layers.feed_forward import Experts, MixtureOfExperts
from onstep.models.layers.head_share import HeadShare
from onstep.models.layers.layer import Attention, Layer
from onstep.models.layers.router import Routing
from onstep.models.sizes import num_query_groups, vocabulary_size
from onstep.models.transformer import Transformer
from onstep.models.vocabulary_share import VocabularyShare

_OF_GROUPS = ("key", "value")
_COLUMNS = ("query", *_OF_GROUPS, "gate", "up")
_ROWS = ("output", "down")

Parts = Iterator[tuple[str, Part]]
"""What a rank computes of modules, by name."""


def plan_of(model: Transformer, ranks: TensorRanks) -> dict[str, Part]:
    """What a rank computes of each module, by name.

    Queries, keys, values, and the first matrices of feed-forward blocks are divided by outputs, so by heads; the
    matrices after them by inputs, and their results are summed. So is each expert. Embedding and output are divided by
    tokens. The rest is replicated. The stages of a pipeline send each other what the plan has between layers: parts of
    sequences, where these are divided.

    Args:
        model: the whole model, or a stage of it.
        ranks: the ranks that divide it.
    """
    layers, seat = _Layers(ranks, num_query_groups(model.config)), seat_of(model)
    plan = {}
    if seat is None or seat.is_last:
        plan["final_norm"] = replace(layers.norm, after=ranks.whole)
    position_embedding, mtp, output = (getattr(model, name, None) for name in ("position_embedding", "mtp", "output"))
    if position_embedding is None:
        plan["embedding"] = vocabulary_embedding(ranks, ranks.leave)
        plan["dropout"] = layers.dropout
    else:  # positions are added to whole sequences
        plan["embedding"] = vocabulary_embedding(ranks, ranks.sum)
        plan["position_embedding"] = Part()
        plan["dropout"] = Part(before=ranks.divided, forward=layers.dropout.forward)
    for index, layer in model.layers.named_children():
        if isinstance(layer, Layer):
            plan |= layers.of_layer(f"layers.{index}", layer)
    for number, depth in enumerate(() if mtp is None else mtp.depths):
        plan |= layers.of_depth(f"mtp.depths.{number}", depth)
    if isinstance(output, LinearForLastLayer):
        plan["output"] = Part()
    elif output is not None:
        plan["output"] = column()
    return plan


@dataclass(frozen=True)
class _Layers:
    """How the modules of a layer are divided."""

    ranks: TensorRanks
    groups: int
    """The number of query groups."""

    @property
    def norm(self) -> Part:
        """A module that computes each position by itself."""
        return Part(sums_gradients=self.ranks.divides_sequences)

    @property
    def dropout(self) -> Part:
        """Dropout between divided modules."""
        return dropout_part(self.ranks, 1, lambda: self.ranks.are_sequences_divided)

    def of_layer(self, prefix: str, layer: Layer) -> dict[str, Part]:
        """A layer of attention and feed-forward."""
        feed, ranks = layer.feed_forward, self.ranks
        region = Part(before=ranks.enter)
        plan = {
            f"{prefix}.attention_norm": self.norm,
            f"{prefix}.attention": region,
            f"{prefix}.attention.query_norm": Part(sums_gradients=True),
            f"{prefix}.attention.key_norm": Part(sums_gradients=True),
            f"{prefix}.feed_forward_norm": self.norm,
            f"{prefix}.feed_forward": region,
            f"{prefix}.dropout": self.dropout,
            **self._of_projections(f"{prefix}.attention", layer.attention, is_summed=True),
        }
        if isinstance(feed, MixtureOfExperts):
            return {**plan, **self._of_experts(f"{prefix}.feed_forward", feed)}
        return {**plan, **self._of_projections(f"{prefix}.feed_forward", feed, is_summed=True)}

    def of_depth(self, prefix: str, depth: Any) -> dict[str, Part]:
        """A depth of multi-token prediction, between the whole hidden states of two."""
        return {
            f"{prefix}.embedding_norm": self.norm,
            f"{prefix}.hidden_norm": replace(self.norm, before=self.ranks.divided),
            f"{prefix}.final_norm": replace(self.norm, after=self.ranks.whole),
            **dict(self._with_adapter(f"{prefix}.projection", depth.projection, self.norm)),
            **self.of_layer(f"{prefix}.layer", depth.layer),
        }

    def _of_experts(self, prefix: str, feed: MixtureOfExperts) -> dict[str, Part]:
        """A mixture, whose ranks route all tokens alike, and sum what they compute of all experts once."""
        ranks = self.ranks
        dims = {"gate_weight": 1, "gate_bias": 1, "up_weight": 1, "up_bias": 1, "down_weight": 2}

        def once(x: Tensor) -> Tensor:
            return counted_once(x, ranks.group)

        def forward(module: Experts, x: Tensor, routing: Routing) -> Tensor:
            weights = copied(routing.weights, ranks.group)
            return type(module).forward(module, x, replace(routing, weights=weights))

        plan = {
            prefix: Part(before=ranks.enter, after=ranks.leave),
            f"{prefix}.router": Part(before=once),
            f"{prefix}.experts": Part(dims, once=("down_bias",), forward=forward),
        }
        if feed.shared_experts is None:
            return plan
        plan[f"{prefix}.shared_experts"] = Part(sums_gradients=True)
        return plan | self._of_projections(f"{prefix}.shared_experts", feed.shared_experts, is_summed=False)

    def _of_projections(self, prefix: str, module: nn.Module, *, is_summed: bool) -> dict[str, Part]:
        """The matrices of a region; without `is_summed`, what is around it sums their results."""
        blocks = self.groups if self.groups < self.ranks.size else None
        found: dict[str, Part] = {}
        for own, projection in module.named_children():
            name = f"{prefix}.{own}"
            if own in _COLUMNS:
                found |= self._with_adapter(name, projection, column(blocks if own in _OF_GROUPS else None))
            elif own in _ROWS:
                linear = getattr(projection, "base_layer", projection)
                part = row(self.ranks, has_bias=getattr(linear, "bias", None) is not None)
                found |= self._with_adapter(name, projection, part if is_summed else _SUMMAND)
        return found

    def _with_adapter(self, name: str, module: nn.Module, part: Part) -> Parts:
        """A projection, perhaps with LoRA: `A` and `B` are divided where they meet what is divided."""
        if getattr(module, "base_layer", None) is None:
            yield name, part
            return
        yield f"{name}.base_layer", part
        dim, ranks = part.dims.get("weight"), self.ranks
        outer = Part(sums_gradients=part is _SUMMAND or ranks.divides_sequences)
        for adapter in module.lora_A:  # type: ignore[union-attr]
            first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
            if dim == 1:
                yield first, replace(part, adds_bias_last=False)
                yield second, outer
                if isinstance(module.lora_dropout[adapter], nn.Dropout):  # type: ignore[index]
                    yield f"{name}.lora_dropout.{adapter}", dropout_part(ranks, -1, lambda: True)
            else:
                yield first, Part(sums_gradients=True) if dim == 0 else part
                yield second, part


_SUMMAND = Part({"weight": 1}, once=("bias",))
"""A linear layer of which each rank has some of the inputs, whose result is summed later."""


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
