"""Who was first? Judges from what the ranks tell of themselves which one has failed, died or hung."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onstep.training.rank_record import RankRecord

Kind = Literal["raised", "died", "hung", "alike", "left"]

ALIKE_SECONDS = 1.0
"""How long the other ranks have, after one has raised, to raise the same."""
CONSEQUENCE_SECONDS = 4.0
"""How long a lost connection waits for the rank that caused it to be found silent."""
SILENT_BEATS = 4.0
"""Missed publications after which a rank is silent, where something else says that it is gone."""


@dataclass(frozen=True)
class Witness:
    """A rank as another one sees it."""

    record: RankRecord
    silence: float = 0.0
    """Seconds since it last published anything."""
    is_gone: bool = False
    """Its process is known not to run any more."""
    is_stopped: bool = False
    """Its process is known to be stopped, as by SIGSTOP."""

    @property
    def idle(self) -> float:
        """Seconds without progress, its silence included."""
        return self.record.idle_seconds + self.silence

    @property
    def is_over(self) -> bool:
        """Whether it has left or failed, so that nothing more is to be expected of it."""
        return self.record.left is not None or self.record.failure is not None


@dataclass(frozen=True)
class Verdict:
    """Which rank was the first to fail, and how; `alike` and `left` need no report."""

    kind: Kind
    rank: int


def judge(
    witnesses: Mapping[int, Witness],
    *,
    interval: float,
    since_first_failure: float = 0.0,
    stopped_seconds: float | None = None,
    on_cuda: bool = False,
) -> Verdict | None:
    """The verdict, or None as long as the run may still go on.

    Args:
        witnesses: every rank.
        interval: seconds between two publications of a rank.
        since_first_failure: seconds since the judge first saw a failure.
        stopped_seconds: how long a process may be stopped, also where it is not watched otherwise.
        on_cuda: a rank that waits for others may stand anywhere that reads the device.
    """
    if any(one.record.failure is not None for one in witnesses.values()):
        return _judge_failures(witnesses, interval, since_first_failure)
    running = {rank: one for rank, one in witnesses.items() if not one.is_over}
    gone = [rank for rank, one in running.items() if one.is_gone and _is_silent(one, interval)]
    if gone:
        return Verdict("died", gone[0])
    return _judge_stalls(running, stopped_seconds, on_cuda)


def _judge_failures(witnesses: Mapping[int, Witness], interval: float, since: float) -> Verdict | None:
    failed = sorted(
        (one.record.failure.order, rank) for rank, one in witnesses.items() if one.record.failure is not None
    )
    if any(one.record.left is not None and one.record.failure is None for one in witnesses.values()):
        return Verdict("left", failed[0][1])
    if _are_interrupted(witnesses):
        return Verdict("alike", failed[0][1])
    if len(failed) == len(witnesses) and _are_alike(witnesses):
        return Verdict("alike", failed[0][1])
    causes = [rank for _, rank in failed if not _is_consequence(witnesses[rank])]
    if causes:
        return Verdict("raised", causes[0]) if since >= ALIKE_SECONDS or len(failed) == len(witnesses) else None
    running = {rank: one for rank, one in witnesses.items() if not one.is_over}
    silent = [(-one.silence, rank) for rank, one in running.items() if _is_silent(one, interval)]
    if silent:
        return Verdict("died", min(silent)[1])
    return Verdict("raised", failed[0][1]) if since >= CONSEQUENCE_SECONDS else None


def _is_silent(one: Witness, interval: float) -> bool:
    """Whether it has published nothing for so long that, with something else wrong, it counts as dead."""
    return one.silence >= max(1.0, SILENT_BEATS * interval)


def _are_alike(witnesses: Mapping[int, Witness]) -> bool:
    failures = [one.record.failure for one in witnesses.values()]
    return len({(one.kind, one.text) for one in failures if one is not None}) == 1


def _are_interrupted(witnesses: Mapping[int, Witness]) -> bool:
    """Whether all ranks were sent SIGINT, as by Ctrl-C; one that waits in a collective cannot raise it yet."""
    return all(
        one.record.is_interrupted or (one.record.failure is not None and one.record.failure.kind == "KeyboardInterrupt")
        for one in witnesses.values()
    )


def _is_consequence(one: Witness) -> bool:
    return one.record.failure is not None and one.record.failure.is_consequence


def _judge_stalls(running: Mapping[int, Witness], stopped_seconds: float | None, on_cuda: bool) -> Verdict | None:
    """A rank that waits in a collective for one that has not arrived is a victim of that one, which may be slow."""
    if not running or any(one.record.is_debugged for one in running.values()):
        return None
    fewest = min(one.record.collectives for one in running.values())
    found = []
    for rank, one in running.items():
        is_ahead = one.record.collectives > fewest and (one.record.is_waiting or on_cuda)
        if not is_ahead and _is_stalled(one, stopped_seconds):
            found.append((one.record.collectives, one.record.is_waiting, -one.idle, rank))
    return Verdict("hung", min(found)[-1]) if found else None


def _is_stalled(one: Witness, stopped_seconds: float | None) -> bool:
    limit = one.record.limit_seconds
    if limit is None and one.is_stopped:
        limit = stopped_seconds
    return limit is not None and one.idle >= limit
