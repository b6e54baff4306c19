"""The reported losses of mixtures of experts and multi-token prediction, and how even the experts' load is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REPORTED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
"""Megatron Bridge's names of the auxiliary losses, by the routers' own."""


def tracked_losses(model: Any) -> dict[str, str]:
    """Which auxiliary losses a model configuration has, with the names that they are reported by.

    A type of load balancing is one of `moe_router_load_balancing_type`, or its only one; part of a name is not enough:
    with `seq_aux_loss` alone there is no `load_balancing_loss`.

    Args:
        model: a `ModelConfig`, or any object with its fields.
    """
    kinds = model.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    found = {kind: REPORTED[kind] for kind in REPORTED if kind in kinds}
    return found | ({"z_loss": REPORTED["z_loss"]} if model.moe_z_loss_coeff is not None else {})


def reported_losses(
    layers: Mapping[int, Mapping[str, Tensor]], names: Mapping[str, str], *, per_layer: bool = False
) -> dict[str, Tensor]:
    """The auxiliary losses by the names that they are reported by, as 0-d device tensors, without coefficients.

    A layer's value is the mean over micro-batches and ranks, a loss the mean over the layers with experts.

    Args:
        layers: of each layer with experts, by its index from 0, the sums over micro-batches by the routers' names, and
            the number of those as `micro_batches`.
        names: what is reported, as `tracked_losses` gives it.
        per_layer: add `moe/<name>_layer_<index>`.

    Source: Megatron-Core's `track_moe_metrics`.
    """
    losses: dict[str, Tensor] = {}
    if not layers:
        return losses
    count = torch.stack([sums["micro_batches"] for sums in layers.values()]).clamp(min=1)
    for kind, name in names.items():
        means = torch.stack([sums[kind] for sums in layers.values()]) / count
        losses[name] = means.mean()
        if per_layer:
            losses |= {f"moe/{name}_layer_{index}": mean for index, mean in zip(layers, means.unbind(), strict=True)}
    return losses


def prediction_losses(sums: Tensor) -> dict[str, Tensor]:
    """`mtp_<i> loss` of each depth, from 1, as 0-d device tensors: the mean over its labels.

    Args:
        sums: (depths, 2), sum of losses and number of labels.
    """
    means: Sequence[Tensor] = (sums[:, 0] / sums[:, 1].clamp(min=1)).unbind()
    return {f"mtp_{depth} loss": mean for depth, mean in enumerate(means, start=1)}


@dataclass(frozen=True)
class RouterLoad:
    """The statistics of one router over some steps."""

    load_min: float
    """Choices of the least chosen expert, as a multiple of an even share."""
    load_max: float
    """Of the most chosen one."""
    load_cv: float
    """Coefficient of variation of the experts' choices: their standard deviation over their mean."""
    dead_experts: int
    """Experts that nobody chose."""
    collapse: float
    """How far the load has collapsed: 0 where it is even, 1 where all tokens go to the same experts."""
    entropy: float | None = None
    """Mean entropy of the tokens' scores, as a share of the largest possible, log of the number of experts."""
    dropped: float | None = None
    """Share of the choices that experts without room dropped."""


def router_load(
    load: Sequence[float], tokens: float | None = None, dropped: float | None = None, entropy: float | None = None
) -> RouterLoad | None:
    """The statistics of a router that was chosen `load[e]` times for expert `e`; None where nobody chose.

    Args:
        tokens: that were routed; without it, as many as choices.
        dropped: choices that were dropped.
        entropy: sum over the tokens of the entropy of their scores, in nats.
    """
    choices, experts = sum(load), len(load)
    if not choices:
        return None
    mean = choices / experts
    deviation = math.sqrt(sum((one - mean) ** 2 for one in load) / experts)
    return RouterLoad(
        load_min=min(load) / mean,
        load_max=max(load) / mean,
        load_cv=deviation / mean,
        dead_experts=sum(not one for one in load),
        collapse=collapse(load, choices / tokens if tokens else 1.0),
        entropy=None if entropy is None or not tokens or experts < 2 else entropy / tokens / math.log(experts),
        dropped=None if dropped is None else dropped / choices,
    )


def collapse(load: Sequence[float], choices_per_token: float) -> float:
    """How much of the way from an even load to one of as few experts as possible, 0 to 1.

    The number of experts in use is the exponential of the load's entropy; a token that goes to `k` experts keeps it at
    `k` at the least.
    """
    total, experts = sum(load), len(load)
    shares = [one / total for one in load if one]
    in_use = math.exp(-sum(share * math.log(share) for share in shares))
    room = experts - choices_per_token
    return min(1.0, max(0.0, (experts - in_use) / room)) if room > 0 else 0.0
