"""Divides models of transformers, and modules of users, between tensor-parallel ranks by the plan that they bring."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from onstep.distributed.tensor_parallel import Part, TensorRanks, vocabulary_embedding
from onstep.distributed.tensor_regions import copied, joined
from onstep.models.hf.tensor_styles import GATHERED, ROWS_OF_TOKENS, SUMMED, styles_of


def plan_of(model: nn.Module, ranks: TensorRanks) -> dict[str, Part]:
    """What a rank computes of each module, by name; modules that the plan lacks are replicated.

    A head whose weight is that of an embedding that is replicated is replicated too.

    Args:
        model: a model of transformers, or any module with an attribute `_tp_plan`.
        ranks: the ranks that divide it.

    Raises:
        ConfigError: for a model without a plan.
    """
    styles = styles_of(model)
    plan: dict[str, Part] = {}
    shared = _shared(model)
    for name, module in model.named_modules():
        style = styles.get(name, "replicate")
        others = shared.get(name, set()) - {name}
        if style in GATHERED and any(not _has_rows(model, one, styles) for one in others):
            style = "replicate"
        if style == ROWS_OF_TOKENS and not _has_rows(model, name, styles):
            style = "replicate"
        if style != "replicate" or module._parameters:
            plan[name] = _part(module, style, ranks)
    return plan


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


def _part(module: nn.Module, style: str, ranks: TensorRanks) -> Part:
    enter = partial(_entered, ranks)
    if style == "rowwise":
        return Part({"weight": 1}, after=ranks.sum, adds_bias_last=getattr(module, "bias", None) is not None)
    if style == "colwise":
        return Part({"weight": 0, "bias": 0}, before=enter)
    if style in GATHERED:
        return Part({"weight": 0, "bias": 0}, before=enter, after=partial(_joined, module, ranks))
    if style == ROWS_OF_TOKENS:
        return vocabulary_embedding(ranks, ranks.sum)
    return Part(sums_gradients=style == SUMMED)


def _entered(ranks: TensorRanks, x: Tensor) -> Tensor:
    return copied(x, ranks.group)


def _joined(module: Any, ranks: TensorRanks, x: Tensor) -> Tensor:
    return joined(x, x.dim() - 1, ranks.group, module.out_features)
