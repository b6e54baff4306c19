"""The reported losses of mixtures of experts and multi-token prediction, from what their routers counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
