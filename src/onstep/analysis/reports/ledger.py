"""Determines where the wall time of a run went, from its metrics log."""

from __future__ import annotations

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
    """Whether `ThroughputMonitor` measured it; else only evaluations are told apart from the rest."""

    @property
    def total(self) -> float:
        """All of it, in seconds."""
        return sum(self.seconds.values())


def time_ledger(log: TrainingLog) -> TimeLedger | None:
    """Where the time of the run went, time lost to rollbacks included; None if its log has no times.

    With `ThroughputMonitor`, the sum over its intervals. Otherwise, evaluations by their `eval_runtime`, and all other
    time between the first and the last record; the time between two processes of the run counts as such, too.
    """
    measured = _measured(log)
    if measured:
        return TimeLedger(measured, is_measured=True)
    times = log.column("timestamp")
    times = times[np.isfinite(times)]
    wall = float(times.max() - times.min()) if len(times) else 0.0
    evaluation = min(_sum(log.column(_EVAL_KEY)), wall)
    found = {"steps, saving and everything else": wall - evaluation, "evaluation": evaluation}
    known = {name: seconds for name, seconds in found.items() if seconds > 0}
    return TimeLedger(known, is_measured=False) if known else None


def _measured(log: TrainingLog) -> dict[str, float]:
    """The sums of the breakdowns of the intervals; the final record, which has their total, does not count."""
    is_interval = ~log.has(_END_KEY)
    found = {words: _sum(log.column(f"{_PREFIX}{name}")[is_interval]) for name, words in _WORDS.items()}
    return {words: seconds for words, seconds in found.items() if seconds > 0}


def _sum(values: NDArray[np.float64]) -> float:
    return float(values[np.isfinite(values) & (values > 0)].sum())
