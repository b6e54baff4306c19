"""Keeps the rounds of one fragment: the submissions of the open round, and when it closes."""

from __future__ import annotations

from collections import deque
from collections.abc import KeysView, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onstep.diloco.protocol.aging import Contribution, reason_to_drop, weighed
from onstep.diloco.protocol.arrivals import Arrivals
from onstep.diloco.protocol.messages import Accepted, Dropped, NotYet, Refused, Reply, Settings, Submit

NUM_NAMED = 5
"""Workers that an answer names."""
NUM_REMEMBERED = 4
"""Earlier rounds whose late arrivals are still measured."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A round without further submissions. Its owner executes the outer step and then calls `committed`."""

    fragment: int
    version: int
    """The version that the outer step produces."""
    contributions: tuple[Contribution, ...]
    is_complete: bool = True
    """Whether all registered workers are in it; if not, it was closed by its deadline."""
    restores: int | None = None
    """The earlier version to which an operator goes back; None for an outer step."""

    is_mean: bool = False
    """Whether the model becomes the mean of those that the workers have reached, without the outer optimizer: all have
    trained on for more than a cycle while the server was away."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """Worker ids in order, each once."""
        return tuple(sorted({one.submit.worker_id for one in self.contributions}))


@dataclass(frozen=True, slots=True)
class LastSubmission:
    """A worker's last submission of a fragment that was committed or dropped."""

    sequence: int
    version: int | None
    """The version that contains it; None if it was dropped."""


@dataclass(frozen=True)
class Committed:
    """All that is known about a fragment once a version is committed, apart from the arrivals."""

    version: int = 0
    digest: str = ""
    contributors: tuple[str, ...] = ()
    steps: float = 0.0
    """Optimizer steps of the run up to this version."""
    last: Mapping[str, LastSubmission] = field(default_factory=dict)
    """By worker."""
    tokens: float = 0.0
    """Of all submissions up to this version."""
    restored_at: int = 0
    """The newest version that an operator went back by: what began before it does not count."""

    def after(self, closed: Closed, digest: str, steps: float) -> Committed:
        """The same after the commit of a round, which brings the run forward by optimizer steps."""
        in_order = sorted(closed.contributions, key=lambda one: one.submit.sequence)
        last = {one.submit.worker_id: LastSubmission(one.submit.sequence, closed.version) for one in in_order}
        restored_at = self.restored_at if closed.restores is None else closed.version
        everybody, all_steps = {**self.last, **last}, self.steps + steps
        tokens = self.tokens + sum(one.submit.tokens for one in closed.contributions)
        return Committed(closed.version, digest, closed.contributors, all_steps, everybody, tokens, restored_at)

    def state_dict(self) -> dict[str, object]:
        """JSON-safe."""
        return {
            "version": self.version,
            "digest": self.digest,
            "contributors": list(self.contributors),
            "steps": self.steps,
            "settled": {worker_id: [one.sequence, one.version] for worker_id, one in self.last.items()},
            "tokens": self.tokens,
            "restored_at": self.restored_at,
        }


@dataclass(slots=True)
class OpenRound:
    """The submissions since the previous round was closed."""

    start: float
    contributions: dict[str, list[Contribution]] = field(default_factory=dict)
    """Of each worker, in order of arrival."""
    quorum_at: float | None = None
    deadline: float | None = None
    num_on_time: int = 0
    """Submissions that start from the newest version."""
    measured_at: float | None = None
    """When these reached the quorum: late submissions say nothing about the duration of a round."""


class Rounds:
    """One fragment's newest version, closed rounds that are being executed, and the open round."""

    def __init__(self, fragment: int, now: float) -> None:
        self.fragment = fragment
        self.committed = Committed()
        self.has_update = False
        """Whether the owner has the update from the previous version to this one, as it has after a commit."""
        self.arrivals = Arrivals()
        self.open = OpenRound(now)
        self.closing: deque[Closed] = deque()
        self.in_flight: dict[str, dict[int, int]] = {}
        """By worker: sequence numbers in rounds that are not committed, with the version that will contain them."""
        self._measured: dict[int, float] = {}
        self._held_back: dict[str, tuple[int, str, bool]] = {}
        """By worker: the last submission taken out of a closed round, why, and whether all its progress goes."""

    @property
    def version(self) -> int:
        """The newest committed version."""
        return self.committed.version

    @property
    def next_version(self) -> int:
        """The version that the open round will produce."""
        return self.committed.version + len(self.closing) + 1

    def known_version(self, worker_id: str, sequence: int) -> int | None:
        """The version that contains or will contain a submission; None if no round has it."""
        last = self.committed.last.get(worker_id)
        if last is not None and last.sequence == sequence:
            return last.version
        in_flight = self.in_flight.get(worker_id)
        return in_flight.get(sequence) if in_flight else None

    def next_sequence(self, worker_id: str) -> int:
        """The first sequence number of a worker that is unknown here."""
        last = self.committed.last.get(worker_id)
        return max(self.in_flight.get(worker_id, ()), default=last.sequence if last else -1) + 1

    def was_dropped(self, submit: Submit) -> bool:
        """Whether the submission is a worker's last, and was dropped."""
        return self.committed.last.get(submit.worker_id) == LastSubmission(submit.sequence, None)

    def answer(self, request: Submit, settings: Settings) -> Reply | None:
        """The answer to a submission that is repeated or cannot count; None if it is new and counts."""
        newest = self.committed.version
        version = self.known_version(request.worker_id, request.sequence)
        if version is not None:
            return Accepted(version, is_repeat=True)
        expected = self.next_sequence(request.worker_id)
        is_anew = request.base_version < self.restored_at
        if request.sequence < expected and self.was_dropped(request):
            return self._dropped_before(request.worker_id, request.sequence)
        if request.sequence < expected:
            error = f"sequence {request.sequence} is over; the next is {expected}"
            return Refused(409, error, {"kind": "old_sequence"})
        if request.base_version > newest:
            error = (
                f"base_version {request.base_version} does not exist, the newest is {newest}; "
                "if the server was started from an older state, restart the workers"
            )
            return Refused(409, error, {"kind": "future_version"})
        if is_anew:
            back = f"it began before version {self.restored_at}, by which an operator went back to an earlier one"
            return Dropped(back, newest, is_anew)
        reason = reason_to_drop(newest + len(self.closing) - request.base_version, settings)
        return None if reason is None else Dropped(reason, newest, is_anew=True)

    @property
    def restored_at(self) -> int:
        """The newest version, committed or not, by which an operator goes back to an earlier one."""
        return max(
            (one.version for one in self.closing if one.restores is not None), default=self.committed.restored_at
        )

    def dropped(self, worker_id: str, sequence: int) -> Dropped | None:
        """The answer about a submission that was taken out of its round; None for any other."""
        if self.committed.last.get(worker_id) != LastSubmission(sequence, None):
            return None
        held = self._held_back.get(worker_id)
        return None if held is None or held[0] != sequence else Dropped(held[1], self.version, held[2])

    def _dropped_before(self, worker_id: str, sequence: int) -> Dropped:
        """The answer to a submission that was dropped: that from then, if it was taken out of its round."""
        return self.dropped(worker_id, sequence) or Dropped("dropped before", self.version, is_anew=True)

    def add(self, one: Contribution, now: float, registered: KeysView[str], settings: Settings) -> None:
        """Put a submission into the open round."""
        arrived, submit = self.open.contributions, one.submit
        arrived.setdefault(submit.worker_id, []).append(one)
        self.in_flight.setdefault(submit.worker_id, {})[submit.sequence] = self.next_version
        if submit.base_version + 1 == self.next_version:
            self._observe_on_time(submit.worker_id, now, settings)
        if settings.mode == "sync" and self.open.quorum_at is None and len(arrived) >= settings.min_workers:
            missing = registered - arrived.keys()
            self.open.quorum_at = now
            self.open.deadline = self.arrivals.deadline(self.open.start, now, missing, settings)

    def _observe_on_time(self, worker_id: str, now: float, settings: Settings) -> None:
        current = self.open
        current.num_on_time += 1
        if current.measured_at is None or current.num_on_time <= settings.min_workers:
            current.measured_at = now
        self.arrivals.observe_lag(worker_id, now - current.measured_at)

    def observe_late(self, submit: Submit, now: float) -> None:
        """Learn from a submission that missed its round."""
        measured_at = self._measured.get(submit.base_version + 1)
        if measured_at is not None:
            self.arrivals.observe_lag(submit.worker_id, now - measured_at)

    def close_if_due(
        self, now: float, registered: KeysView[str], is_complete: bool, settings: Settings
    ) -> Closed | None:
        """Close the open round if all registered workers are in it, or its deadline has passed.

        `is_complete` says whether the registered workers are all that are expected.
        """
        current = self.open
        if self.closing or current.quorum_at is None or current.deadline is None:
            return None
        arrived = current.contributions.keys()
        has_all = is_complete and len(arrived) >= len(registered) and registered <= arrived
        if not has_all and now < current.deadline:
            return None
        is_mean = 2 * len(arrived) > settings.num_workers and all(
            one.scale < 1.0 for some in current.contributions.values() for one in some
        )
        return self.close(now, has_all, is_mean)

    def close(self, now: float, is_complete: bool = True, is_mean: bool = False) -> Closed:
        """Close the open round and open the next."""
        current = self.open
        in_order = [one for worker_id in sorted(current.contributions) for one in current.contributions[worker_id]]
        counted = weighed(in_order, self.next_version)
        closed = Closed(self.fragment, self.next_version, counted, is_complete, is_mean=is_mean)
        if current.measured_at is not None:
            self.arrivals.observe_duration(current.measured_at - current.start)
            self._measured[closed.version] = current.measured_at
            self._measured.pop(closed.version - NUM_REMEMBERED, None)
        self.closing.append(closed)
        self.open = OpenRound(now)
        return closed

    def commit(self, closed: Closed, digest: str, steps: float, now: float) -> None:
        """Make the version of a closed round the newest.

        Raises:
            ValueError: if another round has to be committed first.
        """
        if not self.closing or self.closing[0] is not closed:
            raise ValueError(f"version {closed.version} of fragment {self.fragment} is not the next to commit")
        self.closing.popleft()
        self.committed = self.committed.after(closed, digest, steps)
        self.has_update = True
        for one in closed.contributions:
            self._land(one.submit)
        self.open.start = now

    def hold_back(self, closed: Closed, reasons: Mapping[int, str]) -> Closed:
        """Take contributions, by their index, out of a closed round: they do not count. Returns what is left of it."""
        for index, reason in reasons.items():
            submit = closed.contributions[index].submit
            self._land(submit)
            self.drop(submit)
            self._held_back[submit.worker_id] = submit.sequence, reason, closed.restores is not None
        left = tuple(one for index, one in enumerate(closed.contributions) if index not in reasons)
        rest = replace(closed, contributions=left)
        self.closing[self.closing.index(closed)] = rest
        return rest

    def go_back(self, version: int, now: float) -> Closed:
        """Close the open round without an outer step: its version is an earlier one once more."""
        closed = replace(self.close(now), restores=version)
        self.closing[-1] = closed
        return closed

    def _land(self, submit: Submit) -> None:
        in_flight = self.in_flight[submit.worker_id]
        del in_flight[submit.sequence]
        if not in_flight:
            del self.in_flight[submit.worker_id]

    def drop(self, submit: Submit) -> None:
        """Remember that a submission was dropped."""
        last = {**self.committed.last, submit.worker_id: LastSubmission(submit.sequence, None)}
        self.committed = replace(self.committed, last=last)

    def explained(self, reply: NotYet, registered: KeysView[str]) -> NotYet:
        """The same answer, with the workers that the open round waits for."""
        arrived = self.open.contributions.keys() or {one for each in self.closing for one in each.contributors}
        missing = sorted(registered - arrived)[:NUM_NAMED]
        return replace(reply, missing=tuple(missing), num_arrived=len(arrived))

    def status(self, now: float, registered: KeysView[str]) -> dict[str, object]:
        """JSON-safe: the open round."""
        return {
            "version": self.version,
            "digest": self.committed.digest,
            "contributors": list(self.committed.contributors),
            "arrived": sorted(self.open.contributions),
            "missing": sorted(registered - self.open.contributions.keys()),
            "age_seconds": now - self.open.start,
            "seconds_to_deadline": None if self.open.deadline is None else self.open.deadline - now,
            "usual_seconds_to_quorum": self.arrivals.usual,
            "num_closing": len(self.closing),
        }

    def state_dict(self) -> dict[str, object]:
        """JSON-safe: what is committed. The open round is not: its submissions are sent again."""
        return {**self.committed.state_dict(), "arrivals": self.arrivals.state_dict()}

    def state_after(self, closed: Closed, digest: str, steps: float) -> dict[str, object]:
        """The `state_dict` after a commit."""
        return {**self.state_dict(), **self.committed.after(closed, digest, steps).state_dict()}

    def load_state_dict(self, state: dict[str, Any], now: float) -> None:
        """Restore a `state_dict`."""
        last = {worker_id: LastSubmission(*one) for worker_id, one in state["settled"].items()}
        self.committed = Committed(
            state["version"],
            state["digest"],
            tuple(state["contributors"]),
            float(state["steps"]),
            last,
            state.get("tokens", 0.0),
            state.get("restored_at", 0),
        )
        self.arrivals.load_state_dict(state["arrivals"])
        self.open = OpenRound(now)
