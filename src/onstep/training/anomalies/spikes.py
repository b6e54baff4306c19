"""Detects spikes: values far above the median of the last accepted steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from onstep.config import AnomalyConfig
from onstep.training.protocols import StateDict

_TO_SIGMA = 1.4826
"""The median absolute deviation of a normal distribution times this factor is its standard deviation.
Source: Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation" (1993), section 1."""


_LEAST_SPREAD = 0.01
"""Minimum spread, as a share of the median: when losses hardly vary, noise must not count as a spike."""


@dataclass(frozen=True)
class Spike:
    """A value above its limit."""

    metric: str
    value: float
    median: float
    limit: float

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g} above {self.limit:.6g} (median of recent steps {self.median:.6g})"


class SpikeDetector:
    """Compares each step's values with the median and median absolute deviation of the last accepted steps.

    A step is a spike if a watched value lies more than `spike_threshold` robust standard deviations above the median of
    the last `spike_window` accepted steps; a drop is never a spike. Spikes are not accepted, so they do not raise the
    limit. The first `spike_warmup` accepted steps are never spikes.

    The values, and therefore the result, must be the same on all ranks.
    """

    def __init__(self, config: AnomalyConfig) -> None:
        self._threshold = config.spike_threshold
        self._warmup = config.spike_warmup
        self._window: dict[str, deque[tuple[int, float]]] = {
            metric: deque(maxlen=config.spike_window) for metric in config.spike_metrics
        }
        self._num_accepted = 0

    def find(self, values: Mapping[str, float]) -> Spike | None:
        """The first watched value that is a spike; None without a spike, or while too few steps are known."""
        if self._num_accepted < self._warmup:
            return None
        for metric, window in self._window.items():
            value = values.get(metric, math.nan)
            if not window or math.isnan(value):
                continue
            center = median(one for _, one in window)
            spread = _TO_SIGMA * median(abs(one - center) for _, one in window)
            limit = center + self._threshold * max(spread, _LEAST_SPREAD * abs(center))
            if value > limit:
                return Spike(metric, value, center, limit)
        return None

    def accept(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step whose update is applied, except those that are not finite."""
        self._num_accepted += 1
        for metric, window in self._window.items():
            value = values.get(metric, math.nan)
            if math.isfinite(value):
                window.append((step, value))

    def forget_after(self, step: int) -> None:
        """Drop the values of later steps, which a rollback has undone."""
        for metric, window in self._window.items():
            self._window[metric] = deque((one for one in window if one[0] <= step), maxlen=window.maxlen)

    def state_dict(self) -> StateDict:
        """The accepted values and their steps."""
        window = {metric: [list(one) for one in values] for metric, values in self._window.items()}
        return {"num_accepted": self._num_accepted, "window": window}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with saved values; a metric that was not watched then starts empty."""
        self._num_accepted = state_dict["num_accepted"]
        for metric, window in self._window.items():
            window.clear()
            window.extend((int(step), float(value)) for step, value in state_dict["window"].get(metric, []))
