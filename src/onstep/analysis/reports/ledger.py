"""Determines where the wall time of a run went, from its metrics log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.training_log import TrainingLog

_PREFIX = "seconds_"
"""Keys of `ThroughputMonitor`."""
_WORDS = {
    "data": "reading data",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "device_wait": "waiting for the device",
    "save": "saving",
    "eval": "evaluation",
    "callbacks": "callbacks",
    "other": "other",
}
_EVAL_KEY, _END_KEY = "eval_runtime", "train_runtime"


@dataclass(frozen=True)
class TimeLedger:
    """The wall time of a run by what it was spent on."""

    seconds: dict[str, float]
    """In words, in the order of display; all above 0."""
    is_measured: bool
    """Whether `ThroughputMonitor` measured it; else only evaluations are known."""

    @property
    def total(self) -> float:
        """All of it, in seconds."""
        return sum(self.seconds.values())


def time_ledger(
    log: TrainingLog, continued_at: float | None = None, decided_at: Iterable[float | None] = ()
) -> TimeLedger | None:
    """Where the time of the run went, time lost to rollbacks included; None if its log has no times.

    With `ThroughputMonitor`, the sum over its intervals. Otherwise, evaluations by their `eval_runtime`, and all other
    time between the first and the last record.

    Args:
        log: The run.
        continued_at: When its last process started (Unix seconds), if there was an earlier one; the time between the
            two is listed separately.
        decided_at: When the run's decisions were made (Unix seconds), None if unknown. A stop and its save come after
            the last record of a process, minutes after it where records are rare.
    """
    measured = _measured(log)
    if measured:
        return TimeLedger(measured, is_measured=True)
    times = log.column("timestamp")
    times = times[np.isfinite(times)]
    wall = float(times.max() - times.min()) if len(times) else 0.0
    stopped = _stopped(times, continued_at, [one for one in decided_at if one is not None])
    evaluation = min(_sum(log.column(_EVAL_KEY)), wall - stopped)
    found = {
        "steps, saving and everything else": wall - evaluation - stopped,
        "evaluation": evaluation,
        "stopped, before it was continued": stopped,
    }
    known = {name: seconds for name, seconds in found.items() if seconds > 0}
    return TimeLedger(known, is_measured=False) if known else None


def _stopped(times: NDArray[np.float64], continued_at: float | None, decided: list[float]) -> float:
    """Seconds from the last record or decision of the earlier process to the start of the last one."""
    if continued_at is None:
        return 0.0
    before = times[times < continued_at]
    if not 0 < len(before) < len(times):
        return 0.0
    return continued_at - max(float(before.max()), *(one for one in decided if one < continued_at), -np.inf)


def _measured(log: TrainingLog) -> dict[str, float]:
    """The sums of the breakdowns of the intervals; the final record, which has their total, does not count."""
    is_interval = ~log.has(_END_KEY)
    found = {words: _sum(log.column(f"{_PREFIX}{name}")[is_interval]) for name, words in _WORDS.items()}
    return {words: seconds for words, seconds in found.items() if seconds > 0}


def _sum(values: NDArray[np.float64]) -> float:
    return float(values[np.isfinite(values) & (values > 0)].sum())
