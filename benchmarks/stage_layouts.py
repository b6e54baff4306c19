"""What each rank of a layout that divides layers or tensors holds and sends, in theory: see "Going distributed"."""

from __future__ import annotations

import re
from typing import Any

from layout_names import IN_BF16, LENGTH, ROWS, Layout, Variant
from onstep.config import ConfigContainer, apply_overrides
from onstep.config.pipelines import layers_of_stages, schedule_of, stages_of_rank
from tensor_layouts import (
    OwnModules,
    Place,
    divides_updates,
    held_of_rank,
    rows_of,
    sent_in_tensors,
    shards_of,
)

LAYERS = 4
"""Of the model whose stages are divided."""
_HIDDEN = 32
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EMBEDDINGS = ("embedding.weight", "embed_tokens.weight", "wte.weight", "wpe.weight")


def held_in_parts(
    layout: Layout, variant: Variant, shapes: list[Any], names: list[str], rank: int = 0
) -> dict[str, float]:
    """Bytes of a rank: 4 for each parameter that it has, 4 for its gradient, 8 for AdamW's state.

    Args:
        layout: of the row.
        variant: of the row.
        shapes: of all parameters of the model, with whether each is trained and the bytes of an element.
        names: their names.
        rank: the rank.
    """
    place = Place.of(layout, rank)
    own = _own(layout, variant, shapes, names, place)
    sizes = {name: held_of_rank(name, one[0], layout, variant, place) * one[2] for name, one in own.items()}
    trained = float(sum(size for name, size in sizes.items() if own[name][1]))
    held = {"parameters": float(sum(sizes.values()))}
    state = 2 * trained
    if divides_updates(layout):  # the gradients are in buffers, and no longer those of the parameters
        state = 2 * rows_of(layout, variant, own, place, place.data)
    else:
        held["gradients"] = trained
    return held if any("=muon" in key for key in variant.keys) else {**held, "state": state}


def sent_in_parts(
    layout: Layout, variant: Variant, shapes: list[Any], names: list[str], rank: int = 0
) -> dict[str, float]:
    """Bytes of a step by kind: those of activations, hidden states between stages, weights and gradients.

    Args:
        layout: of the row.
        variant: of the row.
        shapes: of all parameters of the model, with whether each is trained and the bytes of an element.
        names: their names.
        rank: the rank.
    """
    of_tensors = layout.tensor_ranks > 1 and (variant.door != "train" or variant.model != "own")
    if of_tensors or variant.door == "pretrain" or variant.lora or IN_BF16 in layout.keys:
        return _sent_to_stages(layout, variant, shapes, rank) if layout.stage_ranks > 1 else {}
    place = Place.of(layout, rank)
    own = _own(layout, variant, shapes, names, place)
    found = _between_data(layout, variant, own, place) | _sent_to_stages(layout, variant, shapes, rank)
    if layout.tensor_ranks > 1:
        layers, has_embedding, has_head = _modules(layout, names, place)
        modules = OwnModules(len(layers), has_embedding, has_head)
        for kind, size in sent_in_tensors(layout, variant, own, place, modules).items():
            found[kind] = found.get(kind, 0.0) + size
    if _has_two_embeddings(layout, variant, place):
        name = next(name for name in own if name.endswith(_EMBEDDINGS))
        shared = {name: own[name]}
        if divides_updates(layout):
            found["reduce"] += rows_of(layout, variant, shared, place, place.data)
        else:
            shape, _, width = own[name]
            found["reduce"] += held_of_rank(name, shape, layout, variant, place) * width
    return found


def _between_data(layout: Layout, variant: Variant, own: dict[str, Any], place: Place) -> dict[str, float]:
    """Bytes between ranks with different samples."""
    found, shards = {"gather": 0.0, "scatter": 0.0, "reduce": 0.0}, shards_of(layout)
    trained = {name: one for name, one in own.items() if one[1]}
    if divides_updates(layout):
        whole = rows_of(layout, variant, own, place, 0) * layout.data_ranks  # as many rows for each
        return found | {"gather": whole, "scatter": whole}
    if shards == 1:
        sizes = [held_of_rank(name, one[0], layout, variant, place) * one[2] for name, one in trained.items()]
        return found | ({"reduce": float(sum(sizes))} if layout.data_ranks > 1 else {})

    def whole_of(chosen: dict[str, Any]) -> float:
        sizes = (
            held_of_rank(name, one[0], layout, variant, place, is_padded=True) * one[2] for name, one in chosen.items()
        )
        return float(sum(sizes)) * shards

    is_kept = "fsdp.reshard_after_forward=false" in layout.keys
    has_stages = layout.stage_ranks > 1  # whose weights are gathered, and whose gradients are scattered, by the step
    times = 1 if is_kept and has_stages else (1 if is_kept else 2) * variant.accumulation
    scattered = whole_of(trained) * (1 if has_stages else variant.accumulation)
    reduced = scattered / shards if layout.data_ranks > shards else 0.0
    return {"gather": whole_of(own) * times, "scatter": scattered, "reduce": reduced}


def _sent_to_stages(layout: Layout, variant: Variant, shapes: list[Any], rank: int) -> dict[str, float]:
    """Bytes of hidden states to later stages, and of their gradients to earlier ones."""
    if layout.stage_ranks == 1:
        return {}
    place, parallel, width = Place.of(layout, rank), _parallel(layout), shapes[0][2]
    number = len(layers_of_stages(parallel, LAYERS))
    own = stages_of_rank(parallel, place.stage)
    sends = sum(stage + 1 not in own for stage in own if stage + 1 < number)
    sends += sum(stage - 1 not in own for stage in own if stage)
    parts = layout.tensor_ranks if layout.divides_sequences else 1
    beside = (
        4 * variant.accumulation if any("num_moe_experts" in key for key in variant.keys) else 0
    )  # losses of routers
    return {"send": float(sends * (ROWS // layout.data_ranks * LENGTH // parts * _HIDDEN * width + beside))}


def _own(layout: Layout, variant: Variant, shapes: list[Any], names: list[str], place: Place) -> dict[str, Any]:
    """The shapes of the parameters of a rank's stages; both ends of a pipeline have a tied embedding."""
    layers, has_embedding, has_head = _modules(layout, names, place)

    def is_own(name: str) -> bool:
        if (layer := _LAYER.search(name)) is not None and not name.startswith("mtp."):
            return int(layer[1]) in layers
        if not name.endswith(_EMBEDDINGS):
            return has_head
        is_position = name.endswith(("position_embedding.weight", "wpe.weight"))
        return has_embedding or (not is_position and _has_two_embeddings(layout, variant, place))

    return {name: shape for name, shape in zip(names, shapes, strict=True) if layout.stage_ranks == 1 or is_own(name)}


def _modules(layout: Layout, names: list[str], place: Place) -> tuple[set[int], bool, bool]:
    """The layers of a rank, whether it has the embedding, and whether the head."""
    if layout.stage_ranks == 1:
        found = (_LAYER.search(name) for name in names if not name.startswith("mtp."))
        return {int(one[1]) for one in found if one is not None}, True, True
    parallel = _parallel(layout)
    stages, own = layers_of_stages(parallel, LAYERS), stages_of_rank(parallel, place.stage)
    return {layer for stage in own for layer in stages[stage]}, 0 in own, len(stages) - 1 in own


def _has_two_embeddings(layout: Layout, variant: Variant, place: Place) -> bool:
    """Whether the ends of the model, on different ranks, have both the embedding, of which this rank has one."""
    keys = dict(key.split("=") for key in variant.keys)
    ties = keys.get("model.share_embeddings_and_output_weights") == "true" or variant.model == "gpt2"
    uses = ties or variant.options.get("tie_word_embeddings") or int(keys.get("model.mtp_num_layers", 0))
    if not uses or layout.stage_ranks == 1:
        return False
    is_v = schedule_of(_parallel(layout)).chunks == "two"
    return not is_v and place.stage in (0, layout.stage_ranks - 1)


def _parallel(layout: Layout) -> Any:
    config = ConfigContainer()
    apply_overrides(config, [key for key in layout.keys if key.startswith("parallel.")])
    return config.parallel
