"""Mixtures of experts written token by token in float64, to compare with."""

from __future__ import annotations

import math

import torch

FUNCTIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu2": lambda x: torch.clamp(x, min=0) ** 2,
}


def scores_of(config, logits):
    if config.moe_router_score_function == "softmax":
        exponentials = torch.exp(logits - logits.max())
        return exponentials / exponentials.sum()
    return 1 / (1 + torch.exp(-logits))


def route(config, router, token):
    """Experts and weights of one token."""
    logits = router.weight.double() @ token
    scores = scores_of(config, logits)
    wanted = scores if router.expert_bias is None else scores + router.expert_bias.double()
    chosen = sorted(range(len(logits)), key=lambda e: -float(wanted[e].detach()))[: config.moe_router_topk]
    weights = [scores[e] for e in chosen]
    is_renormalized = config.moe_router_score_function == "sigmoid" or not config.moe_router_pre_softmax
    if is_renormalized and (config.moe_router_score_function == "softmax" or len(chosen) > 1):
        total = sum(weights)
        weights = [weight / total for weight in weights]
    factor = config.moe_router_topk_scaling_factor or 1.0
    return chosen, [weight * factor for weight in weights]


def expert(config, experts, number, token):
    f = FUNCTIONS[config.activation_func]

    def matrix(name, x):
        out = getattr(experts, f"{name}_weight")[number].double() @ x
        bias = getattr(experts, f"{name}_bias")
        return out if bias is None else out + bias[number].double()

    inner = matrix("up", token)
    inner = f(matrix("gate", token)) * inner if config.gated_linear_unit else f(inner)
    return matrix("down", inner)


def kept(config, choices, weights):
    """Which (token, expert) stay where an expert takes so many only."""
    if config.moe_expert_capacity_factor is None:
        return {(t, e) for t, chosen in enumerate(choices) for e in chosen}
    experts, topk = config.num_moe_experts, config.moe_router_topk
    capacity = max(1, math.ceil(len(choices) * topk / experts * config.moe_expert_capacity_factor))
    stay = set()
    for e in range(experts):
        queue = [
            (t, float(w.detach()))
            for t, chosen in enumerate(choices)
            for c, w in zip(chosen, weights[t], strict=True)
            if c == e
        ]
        if config.moe_token_drop_policy == "probs":
            queue.sort(key=lambda one: -one[1])
        stay |= {(t, e) for t, _ in queue[:capacity]}
    return stay


def layer(config, moe, x):
    """What a `MixtureOfExperts` gives for `x` (batch, seq, hidden)."""
    tokens = x.double().flatten(0, 1)
    routed = [route(config, moe.router, token) for token in tokens]
    choices, weights = [one[0] for one in routed], [one[1] for one in routed]
    stay = kept(config, choices, weights)
    rows = []
    for t, token in enumerate(tokens):
        row = torch.zeros_like(token)
        for e, weight in zip(choices[t], weights[t], strict=True):
            if (t, e) in stay:
                row = row + weight * expert(config, moe.experts, e, token)
        if moe.shared_experts is not None:
            shared, f = moe.shared_experts, FUNCTIONS[config.activation_func]
            inner = f(shared.gate.weight.double() @ token) * (shared.up.weight.double() @ token)
            out = shared.down.weight.double() @ inner
            if shared.gate_weight is not None:
                out = out / (1 + torch.exp(-(shared.gate_weight.double() @ token)))
            row = row + out
        rows.append(row)
    return torch.stack(rows).view(x.shape)


def balancing(config, weight, x, choices=None):
    """The load-balancing loss of tokens `x` (tokens, hidden), the choices counted here or by expert in `choices`."""
    experts, topk, tokens = weight.shape[0], config.moe_router_topk, x.shape[0]
    means, counts = [torch.zeros((), dtype=torch.float64)] * experts, [0] * experts
    for token in x.double():
        scores = scores_of(config, weight.double() @ token)
        scores = scores / scores.sum()
        for e in sorted(range(experts), key=lambda e: -float(scores[e].detach()))[:topk]:
            counts[e] += 1
        means = [mean + score / tokens for mean, score in zip(means, scores, strict=True)]
    shares = [one / sum(choices or counts) for one in (choices or counts)]
    return experts * sum(share * mean for share, mean in zip(shares, means, strict=True)), counts


def sequence_balancing(config, weight, x):
    """The mean over the sequences of `x` (batch, seq, hidden)."""
    return sum(balancing(config, weight, sequence)[0] for sequence in x) / x.shape[0]


def z(weight, x):
    """The z loss of `x` (tokens, hidden)."""
    logs = [torch.log(torch.exp(weight.double() @ token).sum()) for token in x.double()]
    return sum(log**2 for log in logs) / len(logs)
