"""Computes the reported losses of mixtures of experts and multi-token prediction, and statistics of the expert load."""

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
"""Megatron Bridge's names of the auxiliary losses, by the names that routers use."""


def tracked_losses(model: Any) -> dict[str, str]:
    """The auxiliary losses of a model configuration, with the names under which they are reported.

    A load-balancing type counts only if it equals an entry of `moe_router_load_balancing_type`; a partial match is not
    enough: `seq_aux_loss` alone does not imply `load_balancing_loss`.

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
    """The auxiliary losses under their reported names, as 0-d device tensors, without coefficients.

    A layer's value is the mean over micro-batches and ranks; a loss is the mean over the layers with experts.

    Args:
        layers: for each layer with experts, by its 0-based index, the sums over micro-batches by the routers' names,
            and their number as `micro_batches`.
        names: the losses to report, as returned by `tracked_losses`.
        per_layer: also add `moe/<name>_layer_<index>`.

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
    """`mtp_<i> loss` of each depth, counted from 1, as 0-d device tensors: the mean over its labels.

    Args:
        sums: (depths, 2), the sum of losses and number of labels of each depth.
    """
    means: Sequence[Tensor] = (sums[:, 0] / sums[:, 1].clamp(min=1)).unbind()
    return {f"mtp_{depth} loss": mean for depth, mean in enumerate(means, start=1)}


@dataclass(frozen=True)
class RouterLoad:
    """The statistics of one router over some steps."""

    load_min: float
    """Load of the least chosen expert, as a multiple of an even share."""
    load_max: float
    """Load of the most chosen expert, as a multiple of an even share."""
    load_cv: float
    """Coefficient of variation of the experts' load: standard deviation divided by mean."""
    dead_experts: int
    """Number of experts that no token chose."""
    collapse: float
    """Degree of routing collapse: 0 for an even load, 1 if all tokens go to the same experts."""
    entropy: float | None = None
    """Mean entropy of the tokens' scores, as a fraction of its maximum, the log of the number of experts."""
    dropped: float | None = None
    """Fraction of choices dropped because an expert was at capacity."""


def router_load(
    load: Sequence[float], tokens: float | None = None, dropped: float | None = None, entropy: float | None = None
) -> RouterLoad | None:
    """The statistics of a router for which expert `e` was chosen `load[e]` times; None if there were no choices.

    Args:
        tokens: number of routed tokens; by default, the number of choices.
        dropped: number of dropped choices.
        entropy: sum over tokens of the entropy of their scores, in nats.
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
    """The concentration of the load: 0 if even, 1 if on as few experts as possible.

    The effective number of experts is the exponential of the load's entropy; with `k` experts per token, it is at
    least `k`.
    """
    total, experts = sum(load), len(load)
    shares = [one / total for one in load if one]
    in_use = math.exp(-sum(share * math.log(share) for share in shares))
    room = experts - choices_per_token
    return min(1.0, max(0.0, (experts - in_use) / room)) if room > 0 else 0.0
