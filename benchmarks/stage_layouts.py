"""What the first rank of a pipeline holds and sends, in theory: see "Going distributed"."""

from __future__ import annotations

import math
import re
from typing import Any

from layout_names import LENGTH, ROWS, Layout, Variant
from onstep.config import ConfigContainer, apply_overrides
from onstep.config.pipelines import layers_of_stages, stages_of_rank
from tensor_layouts import held_of_rank

LAYERS = 4
"""Of the model whose stages are divided."""
_HIDDEN = 32
_LAYER = re.compile(r"(?:model\.layers|transformer\.h|layers)\.(\d+)\.")
_AT_THE_END = re.compile(r"(?:model\.norm|transformer\.ln_f|lm_head|final_norm|output)\.")
_EMBEDDING = re.compile(r"(?:model\.embed_tokens|transformer\.wte|embedding)\.weight$")
"""The names of parameters of Onstep's transformer and of models of transformers."""


def own_names(layout: Layout, names: list[str]) -> list[str]:
    """The parameters on rank 0, which has the first stage; of tied embeddings, it counts the only one."""
    parallel = _parallel(layout)
    stages, own = layers_of_stages(parallel, LAYERS), stages_of_rank(parallel, 0)
    layers = {layer for stage in own for layer in stages[stage]}
    has_last = len(stages) - 1 in own

    def is_own(name: str) -> bool:
        of_layer = _LAYER.match(name)
        if of_layer is not None:
            return int(of_layer[1]) in layers
        return has_last if _AT_THE_END.match(name) else True

    return [name for name in names if is_own(name)]


def held_in_stages(layout: Layout, variant: Variant, shapes: list[Any], names: list[str]) -> dict[str, float]:
    """Bytes of rank 0: 4 for each parameter of its stages, 4 for its gradient, 8 for AdamW's state.

    Args:
        layout: of the row.
        variant: of the row.
        shapes: of all parameters of the model.
        names: their names.
    """
    own, keys = set(own_names(layout, names)), dict(key.split("=") for key in layout.keys)
    shards = int(keys.get("parallel.data_parallel_shard_size", 1))
    of_name = dict(zip(names, shapes, strict=True))
    sizes = {name: held_of_rank(name, of_name[name][0], layout, variant, shards) * of_name[name][2] for name in own}
    trained = float(sum(size for name, size in sizes.items() if of_name[name][1]))
    held = {"parameters": float(sum(sizes.values()))}
    if keys.get("ddp.use_distributed_optimizer") == "true":  # gradients are in buffers
        rows = [(shape, width) for name, (shape, is_trained, width) in of_name.items() if name in own and is_trained]
        ranks = layout.data_ranks
        whole = sum(math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) * width for shape, width in rows)
        return {**held, "state": 2.0 * whole / ranks}
    return {**held, "gradients": trained, "state": 2 * trained}


def sent_in_stages(layout: Layout, variant: Variant, shapes: list[Any], names: list[str]) -> dict[str, float]:
    """Bytes of a step by kind: hidden states to later stages, their gradients to earlier ones, and sums of gradients.

    Args:
        layout: of the row.
        variant: of the row.
        shapes: of all parameters of the model.
        names: their names.
    """
    parallel, width = _parallel(layout), shapes[0][2]
    number, own = len(layers_of_stages(parallel, LAYERS)), stages_of_rank(parallel, 0)
    sends = sum(stage + 1 not in own for stage in own if stage + 1 < number)
    sends += sum(stage - 1 not in own for stage in own if stage)
    found = {"send": float(sends * ROWS // layout.data_ranks * LENGTH * _HIDDEN * width)}
    if layout.tensor_ranks > 1 or parallel.data_parallel_shard_size > 1 or variant.door == "pretrain":
        return found  # what tensors and shards send is in the rows without stages
    of_name, reduced = dict(zip(names, shapes, strict=True)), 0
    is_tied = "model.share_embeddings_and_output_weights=true" in variant.keys or variant.model == "gpt2"
    if (is_tied or variant.options.get("tie_word_embeddings")) and number - 1 not in own:
        reduced += math.prod(next(of_name[name][0] for name in names if _EMBEDDING.match(name))) * width
    if "ddp.use_distributed_optimizer=true" in layout.keys:
        ranks = layout.data_ranks
        rows = [of_name[name] for name in own_names(layout, names) if of_name[name][1]]
        whole = sum(math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) * size for shape, _, size in rows)
        return {**found, "reduce": float(reduced), "gather": float(whole), "scatter": float(whole)}
    if layout.data_ranks > 1:
        reduced += sum(math.prod(of_name[name][0]) * width for name in own_names(layout, names) if of_name[name][1])
    return {**found, "reduce": float(reduced), "gather": 0.0, "scatter": 0.0}


def _parallel(layout: Layout) -> Any:
    config = ConfigContainer()
    apply_overrides(config, [key for key in layout.keys if key.startswith("parallel.")])
    return config.parallel
