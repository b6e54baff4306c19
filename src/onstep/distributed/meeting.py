"""Lets the ranks that start together find each other in a store which still has what earlier ranks wrote.

The store of `torchrun` outlives the ranks, and nothing in their environment names the attempt: each node counts its own
restarts, and a node that has joined later has counted fewer.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from onstep.config.parallel_sizes import places
from onstep.errors import ConfigError

_PREFIX = "onstep/meeting"
_ATTEMPT = f"{_PREFIX}/attempt"
_PAUSES = (0.002, 0.05)
"""Seconds between two looks into the store: the first pause and, after as long a time again, the longest."""
_READ_SECONDS = 5.0
"""How long rank 0, whose process may keep the store, waits for the others to have read why they are refused."""
_MOST_NAMED = 3
"""Differences that a message names."""


def meet(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    facts: Mapping[str, str] | None = None,
    place: Callable[[int], str] = "rank {}".format,
) -> str:
    """A name that the ranks of this attempt have in common, and no earlier one had. Collective, by the store alone.

    Args:
        store: a store of torch that all of these ranks see.
        rank: this rank.
        size: the number of ranks.
        timeout: how long to wait for the others.
        facts: what must be the same on all ranks that have it, by name.
        place: names a rank.

    Raises:
        ConfigError: naming the ranks that have not come in time; on all ranks alike, what differs between them.
    """
    me, clock = uuid.uuid4().hex, _Clock(timeout, place)
    if rank == 0:
        store.set(f"{_PREFIX}/{me}/facts", json.dumps(dict(facts or {})))
        refusal = _lead(store, size, me, clock)
    else:
        refusal, me = _follow(store, rank, size, me, facts or {}, clock)
    if refusal:
        raise ConfigError(refusal)
    return me


class _Clock:
    """Waits a little between two looks into the store, until the time is over."""

    def __init__(self, timeout: timedelta, place: Callable[[int], str]) -> None:
        self._began, self.timeout, self.place = time.monotonic(), timeout, place

    def wait(self, rank: int, size: int, missing: Callable[[], list[int]]) -> None:
        """Wait a little.

        Raises:
            ConfigError: naming the missing ranks, once the time is over.
        """
        seconds = time.monotonic() - self._began
        time.sleep(min(_PAUSES[1], max(_PAUSES[0], seconds / 20)))
        if seconds < self.timeout.total_seconds():
            return
        there = missing()
        names = places(there[:8], self.place) + (", ..." if len(there) > 8 else "")
        raise ConfigError(
            f"{self.place(rank)} has not met {names} of {size} within "
            f"dist.distributed_timeout_minutes={self.timeout.total_seconds() / 60:g}; look whether another rank has "
            f"ended before it joined, start all with the same $MASTER_ADDR and $MASTER_PORT, or allow more time."
        )


def _lead(store: Any, size: int, me: str, clock: _Clock) -> str:
    """Name the attempt for the ranks whose marks are there, until all have answered; why they are refused, or "".

    A mark may be that of an earlier attempt, until its rank writes another.
    """
    others, known = range(1, size), list[str]()

    def silent() -> list[int]:
        return [rank for rank in others if not store.check([_answer_of(rank, me)])]

    while missing := silent():
        if all(store.check([_mark_of(rank)]) for rank in missing):
            marks = [me, *(mark.decode() for mark in store.multi_get([_mark_of(rank) for rank in others]))]
            if marks != known:
                known = marks
                store.set(_ATTEMPT, json.dumps(known))
        clock.wait(0, size, silent)
    answers = [answer.decode() for answer in store.multi_get([_answer_of(rank, me) for rank in others])]
    refusal = next(filter(None, answers), "")
    store.set(f"{_PREFIX}/{me}/outcome", refusal)
    deadline = time.monotonic() + _READ_SECONDS
    while refusal and time.monotonic() < deadline:  # the store may end with this process
        if all(store.check([f"{_answer_of(rank, me)}/read"]) for rank in others):
            break
        time.sleep(_PAUSES[0])
    return refusal


def _follow(store: Any, rank: int, size: int, me: str, facts: Mapping[str, str], clock: _Clock) -> tuple[str, str]:
    """Why the ranks are refused, or "", and the name under which rank 0 has seen the mark of this rank."""

    def missing() -> list[int]:
        return [one for one in range(1, size) if not store.check([_mark_of(one)])] or [0]

    store.set(_mark_of(rank), me)
    while True:
        known = json.loads(store.get(_ATTEMPT)) if store.check([_ATTEMPT]) else []
        if me in known:
            break
        clock.wait(rank, size, missing)
    attempt = known[0]
    answer = _answer_of(rank, attempt)
    theirs = {"$WORLD_SIZE": str(len(known)), **json.loads(store.get(f"{_PREFIX}/{attempt}/facts"))}
    store.set(answer, _difference(clock.place(rank), {"$WORLD_SIZE": str(size), **facts}, theirs))
    outcome = f"{_PREFIX}/{attempt}/outcome"
    while not store.check([outcome]):
        clock.wait(rank, size, lambda: [one for one in range(1, size) if not store.check([_answer_of(one, attempt)])])
    refusal = store.get(outcome).decode()
    store.set(f"{answer}/read", "")
    return refusal, attempt


def _difference(place: str, own: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What differs from rank 0, in a line with the remedy; "" if nothing does."""
    names = [name for name, text in own.items() if theirs.get(name, text) != text]
    if not names:
        return ""
    listed = "; ".join(f"{name} is {own[name]}, on rank 0 {theirs[name]}" for name in names[:_MOST_NAMED])
    more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"{place} differs from rank 0: {listed}{more}. All ranks must have the same configuration, versions and "
        f"code; start them with the same command, from the same files."
    )


def _mark_of(rank: int) -> str:
    return f"{_PREFIX}/mark/{rank}"


def _answer_of(rank: int, attempt: str) -> str:
    return f"{_PREFIX}/{attempt}/{rank}"
