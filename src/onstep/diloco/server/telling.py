"""Says what happens to a run: who comes and goes, what each round has, and what it led to."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onstep.console.formats import format_si
from onstep.diloco.protocol.rounds import Closed

logger: logging.Logger = logging.getLogger(__name__)

NUM_KEPT = 500
"""Rounds whose loss and tokens the status has."""
NUM_MEASURED = 8
"""The last rounds, by which the next one is expected."""
NUM_NAMED = 6
_WORDS = {
    "joins": "joined",
    "rejoins": "joined again",
    "departures": "left",
    "deaths": "was evicted: it was silent for longer than --heartbeat-timeout",
    "evictions": "was evicted by an operator",
}


@dataclass(frozen=True)
class Done:
    """A committed round."""

    fragment: int
    version: int
    tokens: float
    """Of the run, up to this version."""
    loss: float | None
    """Of the workers that said theirs, weighted by their tokens."""
    contributors: tuple[str, ...]
    seconds: float
    """Since the round before."""
    own_tokens: float
    at: float


class Telling:
    """The words of a server, and the last rounds for its status.

    Args:
        now: seconds, by the clock of the run.
        workers: that are registered.
        absent: workers that were registered before this server started.
        num_fragments: of the model.
    """

    def __init__(
        self, now: float, workers: Collection[str] = (), absent: Sequence[str] = (), num_fragments: int = 1
    ) -> None:
        self._num_fragments = num_fragments
        self.rounds: deque[Done] = deque(maxlen=NUM_KEPT)
        self._last: dict[int, float] = {}
        self._began = now
        self._empty_since = None if workers else now
        self._gone = dict.fromkeys(absent[-NUM_NAMED:], ("was not there when this server started", now))
        """Workers that have left or were evicted, the last of them last: in which words, and when."""

    def member(
        self,
        kind: str,
        worker_id: str,
        reason: str,
        open_steps: int,
        num_registered: int,
        num_workers: int,
        now: float,
    ) -> None:
        """Say that a worker came or went, as the counts of the coordinator name it.

        Args:
            kind: joins, departures, ...
            worker_id: the worker.
            reason: why it left, in its own words, or whose share of the data it continues.
            open_steps: that it took with it, in no submission.
            num_registered: workers that are there now.
            num_workers: that are expected.
            now: by the clock of the run.
        """
        why = f": {reason[:200]}" if reason else ""
        lost = f"; {open_steps} of its steps are in no round, unless it comes back with them" if open_steps else ""
        words = f"{_WORDS[kind]}{why}{lost}"
        logger.info("%s %s (%d of %d workers)", worker_id, words, num_registered, num_workers)
        self._empty_since = None if num_registered else now
        self._gone.pop(worker_id, None)
        if kind not in ("joins", "rejoins"):
            self._gone[worker_id] = words, now
            self._gone = dict(list(self._gone.items())[-NUM_NAMED:])

    def lost(self, worker_id: str, steps: int, reason: str) -> None:
        """Say that steps of a worker are in no round and will be in none."""
        logger.warning("%d steps of %s are lost: %s", steps, worker_id, reason)

    def round(self, closed: Closed, tokens: float, num_bytes: int, now: float, missing: Sequence[str] = ()) -> None:
        """Say what a round that is committed had, and whose work is missing, and remember it."""
        seconds = now - self._last.get(closed.fragment, self._began)
        self._last[closed.fragment] = now
        said = [one.submit for one in closed.contributions if one.submit.loss is not None]
        weight = sum(one.tokens for one in said)
        loss = sum(one.tokens * (one.loss or 0.0) for one in said) / weight if weight else None
        own = float(sum(one.submit.tokens for one in closed.contributions))
        done = Done(closed.fragment, closed.version, tokens, loss, closed.contributors, seconds, own, now)
        self.rounds.append(done)
        logger.info("%s", _line(closed, done, num_bytes, missing, self._num_fragments))

    def status(self, now: float, has_quorum: bool = True) -> dict[str, Any]:
        """JSON-safe: the rounds, the tokens per second of all workers, and when the next round is expected.

        Without a quorum of workers there is neither; without any, it has since when. And who is gone, and why.
        """
        ours = [one for one in self.rounds if one.fragment == 0]
        last = ours[-NUM_MEASURED:]
        usual = statistics.median(one.seconds for one in last) if last else None
        spent = sum(one.seconds for one in last)
        return {
            "history": [{**asdict(one), "at": one.at - now} for one in ours],
            "tokens_per_second": sum(one.own_tokens for one in last) / spent if spent > 0 and has_quorum else None,
            "usual_seconds": usual,
            "seconds_to_next_round": max(0.0, usual - (now - ours[-1].at))
            if usual is not None and has_quorum
            else None,
            "seconds_without_workers": None if self._empty_since is None else now - self._empty_since,
            "gone": {name: {"why": why, "seconds": now - at} for name, (why, at) in self._gone.items()},
        }


def _line(closed: Closed, done: Done, num_bytes: int, missing: Sequence[str], num_fragments: int) -> str:
    where = f"round {closed.version}" + (f" of fragment {closed.fragment}" if num_fragments > 1 else "")
    if closed.restores is not None:
        return f"{where}: version {closed.restores} once more, as an operator asked"
    total = sum(one.weight for one in closed.contributions) or 1.0
    shares: dict[str, float] = {}
    for one in closed.contributions:
        shares[one.submit.worker_id] = shares.get(one.submit.worker_id, 0.0) + one.weight / total
    late = {one.submit.worker_id for one in closed.contributions if one.submit.base_version < closed.version - 1}
    marked = {name: f"{name} {share:.0%}{' late' if name in late else ''}" for name, share in shares.items()}
    named = ", ".join(list(marked.values())[:NUM_NAMED])
    more = f" and {len(shares) - NUM_NAMED} more" if len(shares) > NUM_NAMED else ""
    loss = "" if done.loss is None else f", loss {done.loss:.5f}"
    how = "" if closed.is_complete else f", closed by its deadline{_without(missing)}"
    if closed.is_mean and closed.contributions:
        steps = max(one.submit.steps for one in closed.contributions)
        how += f"; up to {steps} steps without the server: the model is the mean of the workers'"
    return (
        f"{where}: {named or 'nobody'}{more}{loss}, {format_si(done.own_tokens)} of {format_si(done.tokens)} tokens, "
        f"{num_bytes / 1e6:.1f} MB, {done.seconds:.1f} s{how}"
    )


def _without(missing: Sequence[str]) -> str:
    named = ", ".join(missing[:NUM_NAMED])
    return f" without {named}{' ...' if len(missing) > NUM_NAMED else ''}" if named else ""
