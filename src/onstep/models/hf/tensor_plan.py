"""Divides models of transformers, and modules of users, between tensor-parallel ranks by the plan that they bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onstep.distributed.gathered_inputs import product
from onstep.distributed.tensor_parallel import Part, TensorRanks, vocabulary_embedding
from onstep.distributed.tensor_regions import copied, joined
from onstep.models.hf.sequence_regions import SequenceRegions, regions_of
from onstep.models.hf.tensor_styles import (
    COLUMNS,
    EXPERTS,
    GATHERED,
    HEADS_OF_THREE,
    ROWS,
    ROWS_OF_TOKENS,
    SUMMED,
    is_transposed,
    key_value_heads,
    of_keys,
    styles_of,
)


def plan_of(model: nn.Module, ranks: TensorRanks) -> dict[str, Part]:
    """What a rank computes of each module, by name; modules that the plan lacks are replicated.

    A head whose weight is that of an embedding that is replicated is replicated too.

    Args:
        model: a model of transformers, or any module with an attribute `_tp_plan`.
        ranks: the ranks that divide it.

    Raises:
        ConfigError: for a model without a plan, or whose sequences cannot be divided.
    """
    styles = styles_of(model)
    heads = key_value_heads(model)
    blocks = heads if heads is not None and heads < ranks.size else None
    parts = _Parts(ranks, regions_of(model, styles) if ranks.divides_sequences else None, blocks)
    plan: dict[str, Part] = {}
    shared = _shared(model)
    for name, module in model.named_modules():
        style = styles.get(name, "replicate")
        others = shared.get(name, set()) - {name}
        if style in GATHERED and any(not _has_rows(model, one, styles) for one in others):
            style = "replicate"
        if style == ROWS_OF_TOKENS and not _has_rows(model, name, styles):
            style = "replicate"
        part = parts.of(name, module, style)
        if style != "replicate" or module._parameters or part != Part():
            plan[name] = part
    return plan


def share_out(model: nn.Module, ranks: TensorRanks) -> None:
    """Tell the attentions of a model how many heads this rank has.

    Args:
        model: a divided model.
        ranks: the ranks that divide it.
    """
    heads = key_value_heads(model)
    for name, style in styles_of(model).items():
        attention: Any = model.get_submodule(name.rpartition(".")[0])
        if style == HEADS_OF_THREE:
            attention.split_size //= ranks.size
        elif heads is not None and heads < ranks.size and name.endswith("k_proj"):
            attention.num_key_value_groups = attention.num_key_value_groups * heads // ranks.size


def _shared(model: nn.Module) -> dict[str, set[str]]:
    """The modules with the same parameters as a module, by name."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(name)
    return {name: names for names in owners.values() for name in names if len(names) > 1}


def _has_rows(model: nn.Module, name: str, styles: Mapping[str, str]) -> bool:
    """Whether a module is an embedding of which each rank has the rows of some tokens; one that scales them is not."""
    return styles.get(name) == ROWS_OF_TOKENS and type(model.get_submodule(name)) is nn.Embedding


@dataclass(frozen=True)
class _Parts:
    """What a rank computes of a module, by its style and its place."""

    ranks: TensorRanks
    regions: SequenceRegions | None
    """Where sequences are divided; None if they are not."""
    blocks: int | None
    """The number of heads of keys and values, if there are fewer than ranks."""

    def of(self, name: str, module: nn.Module, style: str) -> Part:
        """The part of a module."""
        ranks, regions = self.ranks, self.regions
        divides = regions is not None and regions.are_in_layers(name) and not regions.is_in_mixture(name)
        part = self._of_style(name, module, style, divides=divides)
        if regions is None:
            return part
        if name in regions.regions:
            return replace(part, before=ranks.enter)
        if name in regions.mixtures:
            return replace(part, before=ranks.whole, after=ranks.divided)
        if name == regions.layers[0]:
            part = replace(part, before=ranks.divided)
        return replace(part, after=partial(_whole, ranks)) if name == regions.layers[-1] else part

    def _of_style(self, name: str, module: nn.Module, style: str, *, divides: bool) -> Part:
        """The part of a module; `divides` if what is around it enters whole sequences, and it leaves them."""
        ranks = self.ranks
        before = None if divides else partial(_entered, ranks)
        has_bias = getattr(module, "bias", None) is not None
        dim, forward = (1, _times) if is_transposed(module) else (0, None)
        if style == ROWS:
            after = ranks.leave if divides else ranks.sum
            return Part(
                {"weight": 1 - dim}, sums_gradients=divides, after=after, adds_bias_last=has_bias, forward=forward
            )
        if style == COLUMNS:
            blocks = self.blocks if of_keys(name) else None
            return Part({"weight": dim, "bias": 0}, blocks, before=before, forward=forward)
        if style == HEADS_OF_THREE:
            return Part(sums_gradients=True, before=before, forward=partial(_times_own_heads, ranks))
        if style in GATHERED:
            return Part({"weight": 0, "bias": 0}, before=before, after=partial(_joined, module, ranks))
        if style == ROWS_OF_TOKENS:
            return vocabulary_embedding(ranks, ranks.sum)
        if style == EXPERTS:
            return Part(
                {"down_proj": 2},
                sums_gradients=True,
                before=partial(_entered, ranks),
                after=ranks.sum,
                forward=partial(_of_experts, ranks),
            )
        return Part(sums_gradients=style == SUMMED or divides)


def _times(module: Any, x: Tensor) -> Tensor:
    """`Conv1D` of transformers, with as many outputs as its weight (inputs, outputs) has."""
    return product(x, module.weight.t(), module.bias)


def _times_own_heads(ranks: TensorRanks, module: Any, x: Tensor) -> Tensor:
    """The queries, keys and values of this rank's heads, by their columns of the whole weight."""

    def own(whole: Tensor) -> Tensor:
        by_kind = whole.view(*whole.shape[:-1], 3, -1)
        return by_kind.chunk(ranks.size, -1)[ranks.rank].flatten(-2)

    return product(x, own(module.weight).t(), own(module.bias))


def _of_experts(ranks: TensorRanks, module: Any, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """This rank's summand of stacked experts, by its rows of the whole weights of gate and up."""
    gate, up = (half.chunk(ranks.size, 1)[ranks.rank] for half in module.gate_up_proj.chunk(2, 1))
    module._parameters["gate_up_proj"] = torch.cat([gate, up], 1)
    out: Tensor = type(module).forward(module, x, choices, copied(weights, ranks.group))
    return out


def _entered(ranks: TensorRanks, x: Tensor) -> Tensor:
    return copied(x, ranks.group)


def _whole(ranks: TensorRanks, found: Any) -> Any:
    """What a layer returns, with whole hidden states."""
    return (ranks.whole(found[0]), *found[1:]) if isinstance(found, tuple) else ranks.whole(found)


def _joined(module: Any, ranks: TensorRanks, x: Tensor) -> Tensor:
    return joined(x, x.dim() - 1, ranks.group, module.out_features)
