"""The rounds of one fragment: which submissions are in the open one, and when it closes."""

from __future__ import annotations

from collections import deque
from collections.abc import KeysView
from dataclasses import dataclass, field

from onstep.diloco.protocol.arrivals import Arrivals
from onstep.diloco.protocol.messages import Settings, Submit

NUM_REMEMBERED = 4
"""Earlier rounds whose late arrivals are still measured."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A submission that counts, and its weight in the average (not normalised)."""

    submit: Submit
    weight: float


@dataclass(frozen=True, slots=True)
class Closed:
    """A round that nothing is added to any more. Its owner does the outer step and then says `committed`."""

    fragment: int
    version: int
    """The version that the outer step makes."""
    contributions: tuple[Contribution, ...]
    is_complete: bool = True
    """Whether all registered workers are in it; if not, it was closed by its deadline."""

    @property
    def contributors(self) -> tuple[str, ...]:
        """Worker ids in order, each once."""
        return tuple(sorted({one.submit.worker_id for one in self.contributions}))


@dataclass(slots=True)
class Settled:
    """What became of a worker's last settled submission of a fragment."""

    sequence: int
    version: int | None
    """The version that has it; None if it was dropped."""


@dataclass(slots=True)
class OpenRound:
    """What has arrived since the round before was closed."""

    start: float
    contributions: dict[str, list[Contribution]] = field(default_factory=dict)
    """Of each worker, in order of arrival."""
    quorum_at: float | None = None
    deadline: float | None = None
    num_on_time: int = 0
    """Submissions that start from the newest version."""
    measured_at: float | None = None
    """When the last of them came that a quorum requires: late ones say nothing about how long a round is."""


class Rounds:
    """One fragment's versions, settled submissions, closed rounds that are being executed, and the open round."""

    def __init__(self, fragment: int, now: float) -> None:
        self.fragment = fragment
        self.version = 0
        self.digest = ""
        self.contributors: tuple[str, ...] = ()
        self.steps = 0.0
        self.has_update = False
        """Whether the owner has what leads from the version before to this one, as it has after a commit."""
        self.settled: dict[str, Settled] = {}
        self.arrivals = Arrivals()
        self.open = OpenRound(now)
        self.closing: deque[Closed] = deque()
        self.in_flight: dict[str, dict[int, int]] = {}
        """Sequence numbers that are in a round which is not committed, with the version that will have them."""
        self._measured: dict[int, float] = {}

    @property
    def next_version(self) -> int:
        """The version that the open round will make."""
        return self.version + len(self.closing) + 1

    def known_version(self, worker_id: str, sequence: int) -> int | None:
        """The version that has or will have a submission; None if it is in none."""
        settled = self.settled.get(worker_id)
        if settled is not None and settled.sequence == sequence:
            return settled.version
        in_flight = self.in_flight.get(worker_id)
        return in_flight.get(sequence) if in_flight else None

    def next_sequence(self, worker_id: str) -> int:
        """The first sequence number that is not known from a worker."""
        settled = self.settled.get(worker_id)
        return max(self.in_flight.get(worker_id, ()), default=settled.sequence if settled else -1) + 1

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

    def close_if_due(self, now: float, registered: KeysView[str], is_complete: bool) -> Closed | None:
        """Close the open round if all registered workers are in it, or its deadline has passed.

        `is_complete` says whether the registered workers are all that are expected.
        """
        current = self.open
        if self.closing or current.quorum_at is None or current.deadline is None:
            return None
        arrived = current.contributions.keys()
        has_all = is_complete and len(arrived) >= len(registered) and registered <= arrived
        return self.close(now, has_all) if has_all or now >= current.deadline else None

    def close(self, now: float, is_complete: bool = True) -> Closed:
        """Close the open round and open the next."""
        current = self.open
        in_order = [current.contributions[worker_id] for worker_id in sorted(current.contributions)]
        closed = Closed(self.fragment, self.next_version, tuple(one for some in in_order for one in some), is_complete)
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
        self.version, self.digest, self.contributors = closed.version, digest, closed.contributors
        self.has_update = True
        self.steps += steps
        self.settled.update(_settled_by(closed))
        for one in closed.contributions:
            self._land(one.submit)
        self.open.start = now

    def _land(self, submit: Submit) -> None:
        in_flight = self.in_flight[submit.worker_id]
        del in_flight[submit.sequence]
        if not in_flight:
            del self.in_flight[submit.worker_id]

    def drop(self, submit: Submit) -> None:
        """Remember that a submission was dropped."""
        self.settled[submit.worker_id] = Settled(submit.sequence, None)

    def status(self, now: float, registered: KeysView[str]) -> dict[str, object]:
        """JSON-safe: the open round."""
        return {
            "version": self.version,
            "digest": self.digest,
            "contributors": list(self.contributors),
            "arrived": sorted(self.open.contributions),
            "missing": sorted(registered - self.open.contributions.keys()),
            "age_seconds": now - self.open.start,
            "seconds_to_deadline": None if self.open.deadline is None else self.open.deadline - now,
            "usual_seconds_to_quorum": self.arrivals.usual,
            "num_closing": len(self.closing),
        }

    def state_dict(self) -> dict[str, object]:
        """JSON-safe: what is committed. The open round is not: its submissions are sent again."""
        return {
            "version": self.version,
            "digest": self.digest,
            "contributors": list(self.contributors),
            "steps": self.steps,
            "settled": {worker_id: [one.sequence, one.version] for worker_id, one in self.settled.items()},
            "arrivals": self.arrivals.state_dict(),
        }

    def state_after(self, closed: Closed, digest: str, steps: float) -> dict[str, object]:
        """What `state_dict` will be after `commit`."""
        state = self.state_dict()
        settled = {worker_id: [one.sequence, one.version] for worker_id, one in _settled_by(closed).items()}
        changed = {"version": closed.version, "digest": digest, "contributors": list(closed.contributors)}
        before = state["settled"]
        assert isinstance(before, dict)
        return state | changed | {"steps": self.steps + steps, "settled": before | settled}

    def load_state_dict(self, state: dict[str, object], now: float) -> None:
        """Restore what `state_dict` returned."""
        version, steps, contributors, settled = (state[key] for key in ("version", "steps", "contributors", "settled"))
        arrivals = state["arrivals"]
        assert isinstance(version, int)
        assert isinstance(steps, float | int)
        assert isinstance(contributors, list)
        assert isinstance(settled, dict)
        assert isinstance(arrivals, dict)
        self.version, self.digest, self.steps = version, str(state["digest"]), float(steps)
        self.contributors = tuple(contributors)
        self.settled = {worker_id: Settled(*one) for worker_id, one in settled.items()}
        self.arrivals.load_state_dict(arrivals)
        self.open = OpenRound(now)


def _settled_by(closed: Closed) -> dict[str, Settled]:
    """What is known of each contributor when a round is committed: its last submission."""
    in_order = sorted(closed.contributions, key=lambda one: one.submit.sequence)
    return {one.submit.worker_id: Settled(one.submit.sequence, closed.version) for one in in_order}
