"""Spikes: a loss or gradient norm far above what the last steps had, by an estimate that one outlier cannot move."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onstep.config.parts import AnomalyConfig

_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution times this is its standard deviation.
Source: Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation" (1993), equation 1.2."""
_LEAST_SPREAD = 0.01
"""A spread below this share of the median counts as this much: of losses that hardly differ, noise is no spike."""


@dataclass(frozen=True)
class Spike:
    """A value above its limit."""

    metric: str
    value: float
    median: float
    limit: float

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g} above {self.limit:.6g} (median of the last steps {self.median:.6g})"


class SpikeDetector:
    """Compares each step's values with median and median absolute deviation of the last accepted steps.

    A step is a spike when a watched value lies more than `spike_threshold` robust standard deviations above the median
    of the last `spike_window` accepted steps; values that fall are none. Spikes are not accepted, so that they do not
    raise the limit. The first `spike_warmup` accepted steps are never spikes.

    The values must be the same on all ranks; then so is what is found.
    """

    def __init__(self, config: AnomalyConfig) -> None:
        self._threshold = config.spike_threshold
        self._warmup = config.spike_warmup
        self._window: dict[str, deque[tuple[int, float]]] = {
            metric: deque(maxlen=config.spike_window) for metric in config.spike_metrics
        }
        self._num_accepted = 0

    def find(self, values: Mapping[str, float]) -> Spike | None:
        """The first watched value that is a spike; None where there is none, or too few steps are known."""
        if self._num_accepted < self._warmup:
            return None
        for metric, window in self._window.items():
            value = values.get(metric, math.nan)
            if not window or math.isnan(value):
                continue
            median, limit = self._limit([one for _, one in window])
            if value > limit:
                return Spike(metric, value, median, limit)
        return None

    def accept(self, step: int, values: Mapping[str, float]) -> None:
        """Take up the values of a step whose update is applied; those that are not finite are left out."""
        self._num_accepted += 1
        for metric, window in self._window.items():
            value = values.get(metric, math.nan)
            if math.isfinite(value):
                window.append((step, value))

    def forget_after(self, step: int) -> None:
        """Drop the values of later steps, which a rollback has undone."""
        for metric, window in self._window.items():
            self._window[metric] = deque((one for one in window if one[0] <= step), maxlen=window.maxlen)

    def state_dict(self) -> dict[str, Any]:
        """The accepted values, with their steps."""
        window = {metric: [list(one) for one in values] for metric, values in self._window.items()}
        return {"num_accepted": self._num_accepted, "window": window}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with saved values; a metric that was not watched then starts anew."""
        self._num_accepted = state_dict["num_accepted"]
        for metric, window in self._window.items():
            window.clear()
            window.extend((int(step), float(value)) for step, value in state_dict["window"].get(metric, []))

    def _limit(self, values: list[float]) -> tuple[float, float]:
        median = _median(values)
        spread = _TO_SIGMA * _median([abs(value - median) for value in values])
        return median, median + self._threshold * max(spread, _LEAST_SPREAD * abs(median))


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
