"""Routes tokens to experts and computes the load-balancing losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from onstep.config import ModelConfig
from onstep.models.layers.autocast import without_autocast
from onstep.models.layers.routing_record import (
    FIGURES,
    LOSSES,
    RoutingRecord,
    RoutingStep,
    is_recomputing,
    with_auxiliary_loss,
)

_TINY = 1e-20
"""Keeps the division by a sum of sigmoids finite, as in Megatron-Core."""


def normalized(scores: Tensor) -> Tensor:
    """Scores divided by their sum over the last dimension."""
    return scores / (scores.sum(dim=-1, keepdim=True) + _TINY)


def balancing_scores(logits: Tensor, score_function: str) -> Tensor:
    """Scores (..., experts) that sum to 1 for each token: the softmax, or sigmoids divided by their sum.

    Source: Megatron-Core's `compute_routing_scores_for_aux_loss`.
    """
    return torch.softmax(logits, dim=-1) if score_function == "softmax" else normalized(torch.sigmoid(logits))


def choice_counts(scores: Tensor, topk: int) -> Tensor:
    """The number of tokens of `scores` (..., tokens, experts) with each expert in their top `topk`: (..., experts).

    Choices are made by the scores alone, without an expert bias, since only the scores are affected by the loss.
    """
    chosen = scores.topk(topk, dim=-1).indices
    return torch.zeros_like(scores).scatter_(-1, chosen, 1.0).sum(dim=-2)


def load_balancing_loss(scores: Tensor, counts: Tensor, topk: int) -> Tensor:
    """The load-balancing loss, a scalar, of `scores` (tokens, experts) with choice counts `counts` (experts,).

    Leading dimensions are separate sets of tokens, over which the mean is taken.
    """
    tokens, experts = scores.shape[-2:]
    losses = (scores.sum(dim=-2) * counts).sum(dim=-1) * (experts / (topk * tokens**2))
    return losses.mean()


def share_balancing_loss(scores: Tensor, shares: Tensor) -> Tensor:
    """Like `load_balancing_loss`, for known `shares` (experts,) of all choices, of other tokens too; they sum to 1."""
    return (scores.mean(dim=-2) * shares).sum() * scores.shape[-1]


def z_loss(logits: Tensor) -> Tensor:
    """The mean squared log-sum-exp of logits (tokens, experts), a scalar.

    Source: Zoph et al. 2022, "ST-MoE: Designing Stable and Transferable Sparse Expert Models"
    (arXiv:2202.08906), equation 5.
    """
    return torch.logsumexp(logits, dim=-1).square().mean()


@dataclass(frozen=True)
class Routing:
    """The routing of the tokens of a forward pass."""

    experts: Tensor
    """(tokens, topk), int64: the chosen experts, highest score first."""
    weights: Tensor
    """(tokens, topk): the factor of each expert's output, in float32 or higher precision."""
    load: Tensor
    """(experts,), int64: number of tokens that chose each expert."""
    capacity: int | None = None
    """Maximum number of choices per expert; None for no limit."""


class Router(nn.Module):
    """Chooses `moe_router_topk` of the experts for each token.

    The logits are computed in float32, even under autocast and with half-precision weights. Scores are the softmax or
    the sigmoids of the logits. With softmax, the weights of the chosen experts are taken from the softmax over all
    experts (`moe_router_pre_softmax`) or over the chosen ones; sigmoids are divided by their sum over the chosen
    experts if there are several. `moe_router_topk_scaling_factor` multiplies the weights.

    With `moe_router_enable_expert_bias`, the buffer `expert_bias` is added to the scores for the choice only; the
    training loop adjusts it after each step (`update_expert_bias`). It stays float32 whatever dtype the module is cast
    to: in bfloat16, its small updates would be lost.

    In training, the configured auxiliary losses are added to the gradient automatically
    (`onstep.models.layers.routing_record`), and `record` accumulates statistics.

    Args:
        config: the section `model` of a configuration.
        num_experts: the number of experts.
        layer_index: the index of the layer, from 0.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2.1; DeepSeek-V3 (2024), section 2.1.2,
    for the sigmoids and the bias.
    """

    expert_bias: Tensor | None

    def __init__(self, config: ModelConfig, num_experts: int, layer_index: int = 0) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.layer_index = layer_index
        self.topk = config.moe_router_topk
        self.coefficients = loss_coefficients(config)
        """Coefficients of the auxiliary losses, by the names of `LOSSES`; at 0, a loss is recorded but not trained."""
        self.step = RoutingStep()
        self.record = RoutingRecord(num_experts)
        self.measures_entropy = False
        """Whether the record accumulates the entropies of the tokens' scores."""
        self._score_function = config.moe_router_score_function
        self._pre_softmax = config.moe_router_pre_softmax
        self._scaling_factor = config.moe_router_topk_scaling_factor
        self._capacity_factor = config.moe_expert_capacity_factor
        self._bias_rate = config.moe_router_bias_update_rate
        self._step_counts: Tensor | None = None
        self._step_shares: Tensor | None = None
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        nn.init.normal_(self.weight, 0.0, config.init_method_std)
        has_bias = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32) if has_bias else None)

    def forward(self, x: Tensor) -> Routing:
        """Route `x` (batch, seq, hidden); the tokens of the result are those of `x.flatten(0, 1)`."""
        logits = self.logits(x)
        routing = self.choose(logits.flatten(0, 1))
        if not self.training:
            return routing
        losses = self.losses(logits) if torch.is_grad_enabled() else {}
        if self.step.counts and not self.is_repeated:
            self._count(logits, routing, losses)
        further = [loss * self.coefficients[name] for name, loss in losses.items() if self.coefficients[name]]
        if self.step.collected is not None:
            self.step.collected += [] if is_recomputing() else further
            return routing
        weights = routing.weights
        for loss in further:
            weights = with_auxiliary_loss(weights, loss, self.step)
        return replace(routing, weights=weights)

    def logits(self, x: Tensor) -> Tensor:
        """(..., hidden) to (..., experts), in float32, or float64 if `x` is."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x):
            return linear(x.to(dtype), self.weight.to(dtype))

    def choose(self, logits: Tensor) -> Routing:
        """The routing that follows from `logits` (tokens, experts)."""
        scores = torch.softmax(logits, dim=-1) if self._score_function == "softmax" else torch.sigmoid(logits)
        wanted = scores.detach()
        if self.expert_bias is not None:
            wanted = wanted + self.expert_bias.to(scores.dtype)
        experts = wanted.topk(self.topk, dim=-1).indices
        if self._score_function == "softmax":
            weights = (scores if self._pre_softmax else logits).gather(-1, experts)
            weights = weights if self._pre_softmax else torch.softmax(weights, dim=-1)
        else:
            weights = scores.gather(-1, experts)
            weights = normalized(weights) if self.topk > 1 else weights
        weights = weights if self._scaling_factor is None else weights * self._scaling_factor
        load = torch.zeros(self.num_experts, dtype=torch.int64, device=logits.device)
        load.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
        return Routing(experts, weights, load, self.capacity(logits.shape[0]))

    def capacity(self, tokens: int) -> int | None:
        """Maximum number of choices per expert in a forward pass over `tokens` tokens; None for no limit.

        There is no limit outside training: otherwise the result for a token would depend on the others in its batch,
        even on later ones.

        Source: Fedus et al., "Switch Transformers" (2021), equation 3, with `k` choices per token.
        """
        if self._capacity_factor is None or not self.training:
            return None
        share = tokens * self.topk / self.num_experts
        return max(1, math.ceil(min(share * self._capacity_factor, tokens)))  # a token chooses an expert at most once

    def losses(self, logits: Tensor) -> dict[str, Tensor]:
        """The configured auxiliary losses of `logits` (batch, seq, experts), without their coefficients.

        Collective over all ranks for `global_aux_loss`, except when recomputed inside the backward pass.
        """
        wanted, losses = self.coefficients, {}
        if "z_loss" in wanted:
            losses["z_loss"] = z_loss(logits.flatten(0, 1))
        if not wanted.keys() - {"z_loss"}:
            return losses
        scores = balancing_scores(logits, self._score_function)
        counts = choice_counts(scores.detach(), self.topk)
        if "aux_loss" in wanted:
            losses["aux_loss"] = load_balancing_loss(scores.flatten(0, 1), counts.sum(dim=0), self.topk)
        if "seq_aux_loss" in wanted:
            losses["seq_aux_loss"] = load_balancing_loss(scores, counts, self.topk)
        if "global_aux_loss" in wanted:
            losses["global_aux_loss"] = share_balancing_loss(scores.flatten(0, 1), self._shares(counts.sum(dim=0)))
        return losses

    @property
    def is_repeated(self) -> bool:
        """Whether this forward pass repeats one that was already counted."""
        return self.step.is_replay or is_recomputing()

    def begin_step(self) -> None:
        """Reset the choices of the step so far, over which `global_aux_loss` is computed."""
        self._step_counts = None

    @torch.no_grad()
    def update_expert_bias(self, load: Tensor) -> None:
        """Adjust the bias of each expert towards an even load: `b += rate * sign(mean load - load)`.

        Does nothing for a router without the bias or with a frozen weight.

        Args:
            load: (experts,), the number of choices in a step over all micro-batches and ranks.

        Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), algorithm 1.
        """
        if self.expert_bias is None or not self.weight.requires_grad:
            return
        self.expert_bias.add_(torch.sign(load.mean() - load).to(self.expert_bias), alpha=self._bias_rate)

    def routing_totals(self) -> dict[str, Tensor] | None:
        """Statistics accumulated in training so far, on the device; None before the first forward pass.

        `load` (experts,), and the scalars `tokens`, `dropped` and `entropy`. A training loop may reset them at each
        step, see `onstep.models.layers.routing_record`.
        """
        row = self.record.row
        if row is None:
            return None
        figures = dict(zip(FIGURES, row[self.num_experts :].unbind(), strict=True))
        return {"load": row[: self.num_experts], **{name: figures[name] for name in ("tokens", "dropped", "entropy")}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        bias = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def _shares(self, counts: Tensor) -> Tensor:
        """The shares (experts,) of all choices of the step so far over all ranks. Collective.

        When recomputed in the backward pass, returns those of its micro-batch, which ran last.
        """
        if self.is_repeated:
            return counts / counts.sum() if self._step_shares is None else self._step_shares
        counts = counts * float(self.step.counts)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(counts, group=self.step.group)
        total = counts if self._step_counts is None else self._step_counts + counts
        self._step_counts, self._step_shares = total, total / total.sum().clamp(min=1)
        return self._step_shares

    @torch.no_grad()
    def _count(self, logits: Tensor, routing: Routing, losses: Mapping[str, Tensor]) -> None:
        entropy: Tensor | float = 0.0
        if self.measures_entropy:
            entropy = torch.special.entr(balancing_scores(logits.detach(), self._score_function)).sum()
        dropped: Tensor | float = 0.0
        if routing.capacity is not None:
            dropped = (routing.load - routing.capacity).clamp(min=0).sum()
        tokens = float(routing.experts.shape[0])
        self.record.add(routing.load, [tokens, dropped, entropy, 1.0, *(losses.get(name, 0.0) for name in LOSSES)])


def loss_coefficients(config: ModelConfig) -> dict[str, float]:
    """The auxiliary losses of a configuration with their coefficients, by the names of `LOSSES`."""
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    values = list(weights) if isinstance(weights, (list, tuple)) else [weights] * len(names)
    coefficients = {name: float(value) for name, value in zip(names, values, strict=True) if name != "none"}
    if config.moe_z_loss_coeff is not None:
        coefficients["z_loss"] = config.moe_z_loss_coeff
    return coefficients
