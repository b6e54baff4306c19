"""A rank that seems to hang looks at itself before it counts as hung: what the judge knows of it is a moment old."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onstep.training.first_culprit import Verdict, Witness
from onstep.training.rank_record import RankRecord

ANSWER_SECONDS = 3.0
"""How long the accused rank has to answer; without one the judge decides."""


@dataclass(frozen=True)
class Accusation:
    """A rank that seems to hang, how far it was, and when this was first seen."""

    rank: int
    beats: int
    at: float
    """Seconds of the monotonic clock."""


def accusation_of(
    verdict: Verdict | None, witnesses: Mapping[int, Witness], judge: int, known: Accusation | None, now: float
) -> Accusation | None:
    """Whom the judge has to ask; None where there is nobody, or one that cannot answer.

    Args:
        verdict: what the judge has found.
        witnesses: every rank.
        judge: the rank that judges, which looks at itself without being asked.
        known: the accusation before this one.
        now: seconds of the monotonic clock.
    """
    if verdict is None or verdict.kind != "hung" or verdict.rank == judge:
        return None
    one = witnesses[verdict.rank]
    if one.silence > 0 or one.is_stopped:
        return None
    if known is not None and (known.rank, known.beats) == (verdict.rank, one.record.beats):
        return known
    return Accusation(verdict.rank, one.record.beats, now)


def accuser_of(record: RankRecord, witnesses: Mapping[int, Witness]) -> int | None:
    """The judge that says of a rank that it hangs, where the rank is still as far as it was then; else None."""
    for judge, one in witnesses.items():
        if one.silence == 0 and (one.record.accuses, one.record.accused_beats) == (record.rank, record.beats):
            return judge
    return None
