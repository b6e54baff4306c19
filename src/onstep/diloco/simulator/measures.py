"""Counts the rounds, steps, bytes and failures of a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from onstep.diloco.protocol.rounds import Closed


@dataclass(slots=True)
class SiteCounts:
    """Sums over the workers of a site."""

    bytes_up: int = 0
    """Bytes of submissions, including lost and repeated ones."""
    bytes_down: int = 0
    training_seconds: float = 0.0
    alive_seconds: float = 0.0
    steps: int = 0
    """Optimizer steps taken."""
    counted_steps: int = 0
    """Those in committed rounds, counted once for every fragment, like the killed ones."""
    killed_steps: int = 0
    """Those that a killed worker had not submitted."""
    outdated_steps: int = 0
    """Those that a worker gave up, as they began from a version that was too old."""
    failures: int = 0
    outages: int = 0
    lost_requests: int = 0

    def __add__(self, other: SiteCounts) -> SiteCounts:
        return SiteCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A committed round."""

    fragment: int
    version: int
    seconds: float
    """From the commit of the version before, or from the start, to its own."""
    committed_at: float
    contributors: int
    steps: int
    late: int
    """Contributions from an older version."""
    lacked_quorum: bool
    """Whether fewer workers than the quorum were alive and connected at some time during the round."""


@dataclass(slots=True)
class Measures:
    """All counts of a simulation."""

    sites: dict[str, SiteCounts]
    rounds: list[RoundRecord] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of counted contributions by their staleness in versions."""
    evictions: int = 0
    server_failures: int = 0
    _last_commit: dict[int, float] = field(default_factory=dict)

    def note_round(self, closed: Closed, now: float, site_of: dict[str, str], *, lacked_quorum: bool) -> None:
        """Note a committed round and who contributed to it."""
        steps = late = 0
        for one in closed.contributions:
            submit = one.submit
            behind = closed.version - 1 - submit.base_version
            self.staleness[behind] += 1
            late += behind > 0
            steps += submit.steps
            self.sites[site_of[submit.worker_id]].counted_steps += submit.steps
        seconds = now - self._last_commit.get(closed.fragment, 0.0)
        self._last_commit[closed.fragment] = now
        contributors = len(closed.contributors)
        self.rounds.append(
            RoundRecord(closed.fragment, closed.version, seconds, now, contributors, steps, late, lacked_quorum)
        )
