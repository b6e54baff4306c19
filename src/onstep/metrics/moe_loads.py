"""How evenly a router spreads tokens over its experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
