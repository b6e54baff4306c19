"""The auxiliary losses of routers, as formulas.

With `T` tokens, `E` experts, `k` experts of a token, `c_e` the choices of expert `e`, `s_te` the score of expert `e`
for token `t` (rows sum to 1), and `l_te` the logits:

    load balancing = E / (k T^2) * sum over e of (c_e * sum over t of s_te)
    z loss         = 1/T * sum over t of (log sum over e of exp l_te)^2

The first is 1 where loads and mean scores are even, and grows towards `E / k` as they collapse. Both are without their
coefficients.

Source: Fedus et al., "Switch Transformers" (2021), equations 4-6, divided by `k` as Megatron-Core's
`switch_load_balancing_loss_func` does; Zoph et al., "ST-MoE" (2022), equation 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-20
"""Keeps a division by a sum of sigmoids finite, as in Megatron-Core."""


def normalized(scores: Tensor) -> Tensor:
    """Scores divided by their sum over the last dimension."""
    return scores / (scores.sum(dim=-1, keepdim=True) + _TINY)


def balancing_scores(logits: Tensor, score_function: str) -> Tensor:
    """Scores (..., experts) of all experts that sum to 1 for each token: the softmax, or sigmoids over their sum.

    Source: Megatron-Core's `compute_routing_scores_for_aux_loss`.
    """
    return torch.softmax(logits, dim=-1) if score_function == "softmax" else normalized(torch.sigmoid(logits))


def choice_counts(scores: Tensor, topk: int) -> Tensor:
    """How many of (..., tokens, experts) have each expert among their `topk` largest: (..., experts).

    The scores alone choose, without an expert bias: those are what the loss can change.
    """
    chosen = scores.topk(topk, dim=-1).indices
    return torch.zeros_like(scores).scatter_(-1, chosen, 1.0).sum(dim=-2)


def load_balancing_loss(scores: Tensor, counts: Tensor, topk: int) -> Tensor:
    """The load-balancing loss of `scores` (tokens, experts) whose choices are `counts` (experts,); without dimensions.

    Leading dimensions are further sets of tokens, over which the mean is taken.
    """
    tokens, experts = scores.shape[-2:]
    losses = (scores.sum(dim=-2) * counts).sum(dim=-1) * (experts / (topk * tokens**2))
    return losses.mean()


def share_balancing_loss(scores: Tensor, shares: Tensor) -> Tensor:
    """The same where `shares` (experts,) of all choices are known, also those of other tokens; their sum is 1."""
    return (scores.mean(dim=-2) * shares).sum() * scores.shape[-1]


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of the logarithm of the summed exponentials of logits (tokens, experts); without dimensions."""
    return torch.logsumexp(logits, dim=-1).square().mean()
