"""What the ranks of tensor-parallel layouts hold and send, in theory: see "Going distributed"."""

from __future__ import annotations

import math
from typing import Any

from layout_names import DIVIDED, IN_BF16, LENGTH, ROWS, VOCABULARY, Layout, Variant

_COLUMNS = (
    *("embedding", "output", "query", "key", "value", "gate", "up"),
    *("wte", "embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
)
"""Modules that are divided by outputs; among them is the output of the model, but not that of an attention."""
_OF_EXPERTS = ("experts.down_bias", "shared_experts.gate_weight", "shared_experts.down.bias")
"""Replicated parameters of which each rank computes a summand of the gradient."""
_SMALL = 512


def held_in_tensors(layout: Layout, variant: Variant, shapes: list[Any], names: list[str]) -> dict[str, float]:
    """Bytes of rank 0: 4 for each parameter, 4 for its gradient, 8 for AdamW's state."""
    keys = dict(key.split("=") for key in layout.keys)
    shards = int(keys["parallel.data_parallel_shard_size"])
    sizes = [
        _held(name, shape, _parts(name, layout, variant), shards) * width
        for name, (shape, _, width) in zip(names, shapes, strict=True)
    ]
    trained = float(sum(size for size, (_, is_trained, _) in zip(sizes, shapes, strict=True) if is_trained))
    held, state = {"parameters": float(sum(sizes)), "gradients": trained}, 2 * trained
    if DIVIDED[0] in layout.keys:  # the gradients are in buffers, and no longer those of the parameters
        del held["gradients"]
        state = 2 * _rows_of_all(layout, variant, shapes, names) / layout.data_ranks
    return held if any("=muon" in key for key in variant.keys) else {**held, "state": state}


def _parts(name: str, layout: Layout, variant: Variant) -> int:
    """The number of parts of a parameter that is divided: ranks, or groups of keys and values if there are fewer."""
    groups = dict(key.split("=") for key in variant.keys).get("model.num_query_groups", layout.tensor_ranks)
    groups = variant.options.get("num_key_value_heads", groups)
    is_of_group = name.rpartition(".")[0].endswith(("attention.key", "attention.value", "k_proj", "v_proj"))
    return min(int(groups), layout.tensor_ranks) if is_of_group else layout.tensor_ranks


def held_of_rank(name: str, shape: list[int], layout: Layout, variant: Variant, shards: int) -> int:
    """Elements of a parameter on rank 0 of ranks that divide tensors, or only have shards."""
    if layout.tensor_ranks > 1:
        return _held(name, shape, _parts(name, layout, variant), shards)
    return math.ceil(shape[0] / shards) * math.prod(shape[1:])


def _held(name: str, shape: list[int], ranks: int, shards: int) -> int:
    """Elements of a parameter on rank 0, of which ranks have as many parts."""
    sizes, dim = _of_tensor_rank(name, shape, ranks), _divided(name)
    other = 0
    if dim == 0 and len(sizes) > 1 and sizes[1] % shards == 0:
        other = 1
    sizes[other] = math.ceil(sizes[other] / shards)
    return math.prod(sizes)


def _of_tensor_rank(name: str, shape: list[int], ranks: int) -> list[int]:
    """The shape of what the first rank of `tp` has of a parameter, of which ranks have as many parts."""
    sizes, dim = list(shape), _divided(name)
    if dim is not None:
        sizes[dim] = math.ceil(sizes[dim] / ranks)
    return sizes


def _rows_of_all(layout: Layout, variant: Variant, shapes: list[Any], names: list[str]) -> float:
    """Bytes of what the first rank of `tp` has of the trained parameters, with as many rows for each rank of data."""
    ranks, total = layout.data_ranks, 0
    for name, (shape, is_trained, width) in zip(names, shapes, strict=True):
        rows, *others = _of_tensor_rank(name, shape, _parts(name, layout, variant))
        total += math.ceil(rows / ranks) * ranks * math.prod(others) * width * is_trained
    return float(total)


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


def sent_in_tensors(layout: Layout, variant: Variant, shapes: list[Any], names: list[str]) -> dict[str, float]:
    """Bytes of a step by kind: activations, logits, and the gradients of what is replicated.

    With ranks of data where they divide the updates, whose gradients are scattered and whose parameters are gathered.
    """
    divides = DIVIDED[0] in layout.keys
    if (
        (layout.data_ranks > 1 and not divides)
        or variant.door != "train"
        or variant.model != "own"
        or variant.lora
        or IN_BF16 in layout.keys
    ):
        return {}
    options = dict(key.split("=") for key in (*layout.keys, *variant.keys))
    width, tokens = shapes[0][2], ROWS * LENGTH // layout.data_ranks
    depths, hidden, ranks = int(options.get("model.mtp_num_layers", 0)), 32, layout.tensor_ranks
    layers = 3 + depths
    activation = tokens * hidden * width
    again = layers if options.get("model.recompute_granularity") == "full" else 0  # all but the last sum of a layer
    found = {"gather": 0.0, "scatter": 0.0, "reduce": (1.0 + depths) * activation}  # the gradient of the head's input
    chosen = tokens * int(options.get("model.moe_router_topk", 2)) * width
    if chosen // variant.accumulation > _SMALL:  # the gradients of the weights of the chosen experts
        found["reduce"] += chosen * sum(name.endswith("router.weight") for name in names)
    if variant.loss == "step":
        found["gather"] += tokens * math.ceil(VOCABULARY / ranks) * ranks * width
    else:
        of_micro = tokens // variant.accumulation * 4
        found["reduce"] += sum(size * variant.accumulation for size in (of_micro, 2 * of_micro) if size > _SMALL)
    summed = sum(
        math.prod(shape) * size
        for name, (shape, is_trained, size) in zip(names, shapes, strict=True)
        if is_trained and _is_summed(name, of_sequences=layout.divides_sequences)
    )
    summed /= layout.data_ranks  # of each the sum over the ranks of data
    found["reduce"] += summed if summed > _SMALL else 0
    parts = [_parts(name, layout, variant) for name in names]
    copied = sum(
        math.prod(shape) // of_name * size
        for (shape, _, size), of_name in zip(shapes, parts, strict=True)
        if of_name < ranks
    )
    copied /= layout.data_ranks
    found["reduce"] += copied if copied > _SMALL else 0
    if divides:
        found["gather"] += _rows_of_all(layout, variant, shapes, names)
        found["scatter"] += _rows_of_all(layout, variant, shapes, names)
    if not layout.divides_sequences:
        found["reduce"] += (4 * layers + 1 + depths + again) * activation
        return found
    found["gather"] += (4 * layers + 1 + 3 * depths + 2 * again) * activation
    found["scatter"] += (4 * layers + depths + again) * activation
    is_learned = options.get("model.position_embedding_type") == "learned_absolute"
    found["reduce" if is_learned else "scatter"] += activation  # positions are added to whole embeddings
    found["gather"] += activation if is_learned or shapes[names.index("embedding.weight")][1] else 0
    return found
