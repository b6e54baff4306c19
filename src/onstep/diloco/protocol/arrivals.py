"""Learns when workers arrive in rounds, and from that how long a round waits for missing workers."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onstep.diloco.protocol.messages import Settings

MIN_SLACK = 1.0
"""Seconds, for delays by a scheduler or a garbage collector."""
RELATIVE_SLACK = 0.1
"""Of a round's usual duration, for evaluations, checkpoints and a busy network."""
NUM_DURATIONS = 9
"""Rounds of which the median is used, so that one outage does not matter."""


@dataclass(slots=True)
class Lag:
    """How long after the quorum a worker arrives: smoothed mean and deviation, in seconds.

    Source: RFC 6298, section 2 (smoothed round-trip time and its variation).
    """

    mean: float
    deviation: float

    def observe(self, seconds: float) -> None:
        """Learn from one round."""
        self.deviation += (abs(seconds - self.mean) - self.deviation) / 4
        self.mean += (seconds - self.mean) / 8


class Arrivals:
    """The observed arrivals of one fragment's rounds, and the deadline that follows from them.

    A round that started at `s` and reached its quorum at `q` closes, some missing, at `max(q, s + usual) + wait`:

    - `usual` is the median of the last 9 rounds' times to a quorum of workers that were on time,
    - `slack = max(1 s, usual / 10)`,
    - `wait` is the largest `lag + max(4 * deviation, slack)` of the missing workers, `slack` for one that was never
      observed, and at most `(patience - 1) * max(usual, q - s) + slack`; a worker's lag is the time at which it usually
      comes after that quorum.

    Before a round has been observed, `wait` is `initial_deadline`.
    """

    def __init__(self) -> None:
        self._lags: dict[str, Lag] = {}
        self._durations: deque[float] = deque(maxlen=NUM_DURATIONS)
        self._usual: float | None = None

    @property
    def usual(self) -> float | None:
        """Median seconds from the start of a round to its quorum; None before the first."""
        return self._usual

    def observe_lag(self, worker_id: str, seconds: float) -> None:
        """Learn when a worker arrived: seconds after the quorum, 0 if it was part of it."""
        if self._usual is not None:
            seconds = min(seconds, 10 * self._usual + MIN_SLACK)  # one long outage must not be remembered for long
        lag = self._lags.get(worker_id)
        if lag is None:
            self._lags[worker_id] = Lag(seconds, seconds / 2)
        else:
            lag.observe(seconds)

    def observe_duration(self, seconds: float) -> None:
        """Learn how long a round took to reach its quorum."""
        self._durations.append(seconds)
        self._usual = statistics.median(self._durations)

    def deadline(self, start: float, quorum_at: float, missing: Iterable[str], settings: Settings) -> float:
        """When a round closes without the workers that are missing."""
        usual = self._usual
        if usual is None:
            return quorum_at + settings.initial_deadline
        slack = max(MIN_SLACK, RELATIVE_SLACK * usual)
        wait = slack
        for worker_id in missing:
            if lag := self._lags.get(worker_id):
                wait = max(wait, lag.mean + max(4 * lag.deviation, slack))
        longest = (settings.patience - 1) * max(usual, quorum_at - start) + slack
        return max(quorum_at, start + usual) + min(wait, longest)

    def state_dict(self) -> dict[str, object]:
        """JSON-safe."""
        return {
            "lags": {worker_id: [lag.mean, lag.deviation] for worker_id, lag in self._lags.items()},
            "durations": list(self._durations),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._lags = {worker_id: Lag(mean, deviation) for worker_id, (mean, deviation) in state["lags"].items()}
        self._durations.extend(state["durations"])
        self._usual = statistics.median(self._durations) if self._durations else None
