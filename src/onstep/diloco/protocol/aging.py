"""Decides by the age of a submission whether it counts, and how much.

A submission is as old as the oldest work in it: `base_version` is the version that this began from. Age is counted in
rounds. In asynchronous mode a version is made by one submission, so as many versions as there are workers are a round,
and to be behind by those of the other workers is not late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onstep.diloco.protocol.messages import Settings, Submit


@dataclass(frozen=True, slots=True)
class Contribution:
    """A submission that counts, and its weight in the average (not normalised)."""

    submit: Submit
    weight: float
    scale: float = 1.0
    """Factor of the pseudo-gradient, below 1 for late work."""


def age(versions_behind: int, settings: Settings) -> float:
    """Rounds by which work is late that began so many versions before the newest."""
    if settings.mode == "sync":
        return versions_behind
    return max(0, versions_behind - settings.num_workers + 1) / settings.num_workers


def reason_to_drop(versions_behind: int, settings: Settings) -> str | None:
    """Why a submission is too old to count; None if it counts."""
    rounds = age(versions_behind, settings)
    if rounds <= settings.max_staleness:
        return None
    if settings.mode == "sync":
        return f"{versions_behind} versions late, max_staleness is {settings.max_staleness}"
    return f"{versions_behind} versions late, which are {rounds:.1f} rounds, max_staleness is {settings.max_staleness}"


def weighed(contributions: Sequence[Contribution], version: int) -> tuple[Contribution, ...]:
    """The contributions of a synchronous round with their weights.

    Work that began from the version before has its tokens as weight. That of a worker that is late by `s` rounds has at
    most the mean of those, divided by `1 + s`: however much it has trained meanwhile, it counts for less than others.

    Args:
        contributions: weighted by their tokens.
        version: what the round produces.
    """
    behind = [version - 1 - one.submit.base_version for one in contributions]
    late = _tokens(one for one, versions in zip(contributions, behind, strict=True) if versions)
    fresh = _tokens(one for one, versions in zip(contributions, behind, strict=True) if not versions)
    most = sum(fresh.values()) / len(fresh) if fresh else min(late.values(), default=0.0)
    shares = {worker_id: min(1.0, most / tokens) for worker_id, tokens in late.items()}
    return tuple(
        one if not versions else replace(one, weight=one.weight * shares[one.submit.worker_id] / (1 + versions))
        for one, versions in zip(contributions, behind, strict=True)
    )


def scale_of(submit: Submit, versions_behind: int, settings: Settings) -> float:
    """The factor of a pseudo-gradient.

    Late work of more steps than a cycle moves the model as far as a cycle does: a worker was cut off, or all of them
    were while the server was away, and then no version says for how long. In asynchronous mode, in which a submission
    is applied alone, it falls with the age as well.
    """
    length = min(1.0, settings.sync_every / max(1, submit.steps)) if versions_behind else 1.0
    return length if settings.mode == "sync" else length / (1 + age(versions_behind, settings))


def steps_of_round(contributions: Sequence[Contribution], version: int) -> float:
    """Steps by which a synchronous round brings the run forward: the most of any worker that is not late.

    If all are late, the fewest of any, and at most those of a cycle: workers that return do not move the learning-rate
    schedule of joiners.
    """
    fresh = [one.submit.steps for one in contributions if one.submit.base_version == version - 1]
    return max(fresh) if fresh else min((one.scale * one.submit.steps for one in contributions), default=0)


def _tokens(contributions: Iterable[Contribution]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for one in contributions:
        tokens[one.submit.worker_id] += one.weight  # type: ignore[assignment]
    return tokens
