"""Megatron-Core's rule of results that are unexpectedly large: far above the largest of the first ones."""

from __future__ import annotations

import math

from torch import Tensor


class LargestResults:
    """The largest of the first results of each context."""

    def __init__(self) -> None:
        self._largest: dict[str, dict[str, float]] = {}

    def largest(self, context: str) -> float:
        """The largest result of a context so far."""
        return self._largest.get(context, {}).get("largest", 0.0)

    def is_exceeded(
        self,
        result: float | Tensor,
        threshold: float,
        context: str,
        num_samples: int = 100,
        *,
        resample: bool = False,
        records: bool = True,
    ) -> bool:
        """Whether a result is more than `threshold` times the largest of the first `num_samples`. Reads the device.

        The first results are only recorded, and those that are not finite neither.

        Args:
            result: the result; its absolute value counts.
            threshold: how many times the largest it may be.
            context: what the result is compared with.
            num_samples: how many results are recorded.
            resample: start recording again.
            records: whether this result may be recorded.
        """
        value = abs(float(result))
        known = self._largest.setdefault(context, {"num_samples": 0, "largest": 0.0})
        if resample:
            known.update(num_samples=0, largest=0.0)
        if known["num_samples"] >= num_samples:
            return value > threshold * known["largest"]
        if math.isfinite(value) and records:
            known.update(num_samples=known["num_samples"] + 1, largest=max(known["largest"], value))
        return False

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The number of results and the largest one, by context."""
        return {context: dict(known) for context, known in self._largest.items()}

    def load_state_dict(self, state_dict: dict[str, dict[str, float]]) -> None:
        """Continue with saved values."""
        self._largest = {context: dict(known) for context, known in state_dict.items()}
