"""What the ranks of tensor-parallel layouts hold and send, in theory: see "Going distributed"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from layout_names import DIVIDED, LENGTH, ROWS, VOCABULARY, Layout, Variant

_COLUMNS = (
    *("embedding", "output", "query", "key", "value", "gate", "up"),
    *("wte", "embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
)
"""Modules that are divided by outputs; among them is the output of the model, but not that of an attention."""
_OF_EXPERTS = ("experts.down_bias", "shared_experts.gate_weight", "shared_experts.down.bias")
"""Replicated parameters of which each rank computes a summand of the gradient."""
_SHARED = "shared_experts.up.weight"
_HIDDEN = 32
_SMALL = 512


@dataclass(frozen=True)
class Place:
    """The numbers of a rank along the axes of a layout, of which that of tensors is the innermost."""

    tensor: int
    data: int
    shard: int
    stage: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Place:
        """The place of a rank."""
        rest, tensor = divmod(rank, layout.tensor_ranks)
        stage, data = divmod(rest, layout.data_ranks)
        return cls(tensor, data, data % shards_of(layout), stage)


def shards_of(layout: Layout) -> int:
    """The number of ranks that have shards of the same weights."""
    number = int(dict(key.split("=") for key in layout.keys).get("parallel.data_parallel_shard_size", 1))
    return layout.ranks if number == -1 else number


def divides_updates(layout: Layout) -> bool:
    """Whether ranks divide the updates of weights that each has as a whole."""
    return DIVIDED[0] in layout.keys


def _part(size: int, parts: int, index: int) -> int:
    """The size of one of some parts, of which each has as much as the first but for the last ones."""
    each = -(-size // parts)
    return max(0, min(each, size - each * index))


def sizes_of_rank(name: str, shape: list[int], layout: Layout, variant: Variant, place: Place) -> list[int]:
    """The shape of what a rank has of a parameter, if it has no shard of that."""
    sizes, dim = list(shape), _divided(name)
    if dim is not None and layout.tensor_ranks > 1:
        parts = _parts(name, layout, variant)
        sizes[dim] = _part(sizes[dim], parts, place.tensor * parts // layout.tensor_ranks)
    return sizes


def held_of_rank(
    name: str, shape: list[int], layout: Layout, variant: Variant, place: Place, *, is_padded: bool = False
) -> int:
    """Elements of a parameter that a rank has; with `is_padded`, as many as the rank that has most of its shards."""
    sizes, shards = sizes_of_rank(name, shape, layout, variant, place), shards_of(layout)
    other = 0
    if layout.tensor_ranks > 1 and _divided(name) == 0 and len(sizes) > 1 and sizes[1] % shards == 0:
        other = 1
    sizes[other] = _part(sizes[other], shards, 0 if is_padded else place.shard)
    return math.prod(sizes)


def rows_of(layout: Layout, variant: Variant, shapes: dict[str, Any], place: Place, data: int) -> float:
    """Bytes of the rows, of the trained parameters that a rank has, which a rank of data updates."""
    total = 0
    for name, (shape, is_trained, width) in shapes.items():
        rows, *others = sizes_of_rank(name, shape, layout, variant, place)
        total += _part(rows, layout.data_ranks, data) * math.prod(others) * width * is_trained
    return float(total)


def _parts(name: str, layout: Layout, variant: Variant) -> int:
    """The number of parts of a parameter that is divided: ranks, or groups of keys and values if there are fewer."""
    groups = dict(key.split("=") for key in variant.keys).get("model.num_query_groups", layout.tensor_ranks)
    groups = variant.options.get("num_key_value_heads", groups)
    is_of_group = name.rpartition(".")[0].endswith(("attention.key", "attention.value", "k_proj", "v_proj"))
    return min(int(groups), layout.tensor_ranks) if is_of_group else layout.tensor_ranks


def _divided(name: str) -> int | None:
    """The dimension by which a parameter is divided; None if it is replicated."""
    name = name.replace(".base_layer.", ".")
    module, _, own = name.rpartition(".")
    if module.endswith((".c_attn", ".c_fc", ".c_proj")):  # Conv1D, of which the first is replicated
        of_fc, of_projection = {"weight": 1, "bias": 0}, {"weight": 0}
        return {"c_fc": of_fc, "c_proj": of_projection}.get(module.rpartition(".")[2], {}).get(own)
    if own in ("gate_up_proj", "down_proj") or module.endswith("mlp.gate"):  # of Mixtral
        return 2 if own == "down_proj" else None
    if module.endswith(".experts"):
        return {"down_weight": 2, "down_bias": None}.get(own, 1)
    if ".lora_" in name:  # A of a layer that is divided by inputs, B of one that is divided by outputs
        target, _, which = name.partition(".lora_")
        of_target = _divided(f"{target}.weight")
        return of_target if of_target == (1 if which[0] == "A" else 0) else None
    if module.endswith(("attention.output", "down", "o_proj", "down_proj")):
        return 1 if own == "weight" else None
    return 0 if module.rpartition(".")[2] in _COLUMNS else None


def _is_summed(name: str, *, of_sequences: bool) -> bool:
    """Whether ranks compute summands of the gradient of a parameter."""
    module = name.rpartition(".")[0]
    if module.endswith(("query_norm", "key_norm")) or name.endswith(_OF_EXPERTS):
        return True
    is_alike = module.endswith(("norm", "projection"))
    return of_sequences and (is_alike or (_divided(name) is None and name.endswith("bias")))


@dataclass(frozen=True)
class OwnModules:
    """What a rank has of a model."""

    layers: int
    """The number of layers, without those of multi-token prediction."""
    has_embedding: bool
    has_head: bool


def sent_in_tensors(
    layout: Layout, variant: Variant, shapes: dict[str, Any], place: Place, own: OwnModules
) -> dict[str, float]:
    """Bytes of a step by kind between the ranks of `tp`: activations, logits, gradients of what is replicated.

    Args:
        layout: of the row.
        variant: of the row.
        shapes: of the parameters of a rank, with whether each is trained and the bytes of an element, by name.
        place: of the rank.
        own: what it has.
    """
    options = dict(key.split("=") for key in (*layout.keys, *variant.keys))
    width, tokens = next(iter(shapes.values()))[2], ROWS * LENGTH // layout.data_ranks
    depths, ranks = int(options.get("model.mtp_num_layers", 0)) * own.has_head, layout.tensor_ranks
    layers = own.layers + depths
    activation = tokens * _HIDDEN * width
    again = layers if options.get("model.recompute_granularity") == "full" else 0  # all but the last sum of a layer
    found = {"gather": 0.0, "scatter": 0.0, "reduce": 0.0, "each": 0.0}
    chosen = _chosen(layout, variant) * width
    if chosen // variant.accumulation > _SMALL:  # the gradients of the weights of the chosen experts
        found["reduce"] += chosen * sum(name.endswith("router.weight") for name in shapes)
    if own.has_head:
        found["reduce"] += (1 + depths) * activation  # the gradient of the head's input
        if variant.loss == "step":
            found["gather"] += tokens * math.ceil(VOCABULARY / ranks) * ranks * width
        else:
            parts = variant.accumulation * variant.losses_of_micro_batch
            of_part = tokens // parts * 4
            found["reduce"] += sum(size * parts for size in (of_part, 2 * of_part) if size > _SMALL)
    in_parts = [_summed(layout, variant, shapes, place), _copied(layout, variant, shapes, place)]
    if shards_of(layout) > 1 or (layout.data_ranks > 1 and layout.stage_ranks == 1 and not divides_updates(layout)):
        is_once = layout.stage_ranks > 1 or shards_of(layout) == 1
        found["each"] = float(sum(map(sum, in_parts)) * (1 if is_once else variant.accumulation))  # by FSDP2
        in_parts = []
    for sizes in in_parts:
        if sum(sizes) > _SMALL:
            found["reduce"] += sum(sizes)
    ends = own.has_embedding + depths  # embeddings
    if not layout.divides_sequences:
        found["reduce"] += (4 * layers + ends + again) * activation
        return found
    regions = sum(name.endswith(("attention.query.weight", "feed_forward.up.weight", _SHARED)) for name in shapes)
    is_kept = variant.losses_of_micro_batch == 1  # in chunks, gradients are computed with the losses
    heads = own.has_head + depths
    found["gather"] += (4 * layers + 2 * depths + heads * (1 + is_kept) + 2 * again + regions) * activation
    found["scatter"] += (4 * layers + depths + again) * activation
    if own.has_embedding:
        is_learned = options.get("model.position_embedding_type") == "learned_absolute"
        found["reduce" if is_learned else "scatter"] += activation  # positions are added to whole embeddings
        found["gather"] += activation if is_learned or shapes["embedding.weight"][1] else 0
    return found


def small_sums_of_experts(layout: Layout, variant: Variant, names: list[str]) -> int:
    """Sums of a step, over the ranks of `tp`, of gradients of the weights of the chosen experts, where they are small.

    Args:
        layout: of the row.
        variant: of the row.
        names: of the parameters.
    """
    chosen = _chosen(layout, variant) * getattr(torch, variant.dtype).itemsize
    number = variant.accumulation * sum(name.endswith("router.weight") for name in names)
    return number if chosen // variant.accumulation <= _SMALL else 0


def _chosen(layout: Layout, variant: Variant) -> int:
    """The number of experts that a layer chooses for the tokens of a step."""
    keys = dict(key.split("=") for key in variant.keys)
    return ROWS * LENGTH // layout.data_ranks * int(keys.get("model.moe_router_topk", 2))


def _summed(layout: Layout, variant: Variant, shapes: dict[str, Any], place: Place) -> list[float]:
    """Bytes of the gradients of which ranks compute summands, which those of shards do before they are scattered."""
    return [
        _own_rows(name, shape, layout, variant, place) * width
        for name, (shape, is_trained, width) in shapes.items()
        if is_trained and _is_summed(name, of_sequences=layout.divides_sequences)
    ]


def _copied(layout: Layout, variant: Variant, shapes: dict[str, Any], place: Place) -> list[float]:
    """Bytes of the gradients of parts that several ranks have."""
    return [
        _own_rows(name, shape, layout, variant, place) * width
        for name, (shape, is_trained, width) in shapes.items()
        if is_trained and _parts(name, layout, variant) < layout.tensor_ranks
    ]


def _own_rows(name: str, shape: list[int], layout: Layout, variant: Variant, place: Place) -> float:
    """Elements of the gradient of a parameter that a rank sums over the ranks of `tp`: all, or of rows it updates."""
    rows, *others = sizes_of_rank(name, shape, layout, variant, place)
    own = _part(rows, layout.data_ranks, place.data) if divides_updates(layout) else rows
    return float(own * math.prod(others))
