"""Times the steps of a run from outside the loop, for benchmarks of what runs beside it."""

from __future__ import annotations

import itertools
import statistics
import time

from onstep import Callback, CallbackContext


class StepTimes(Callback):
    """The seconds between the ends of two steps."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def on_step_end(self, context: CallbackContext) -> None:
        """Note when a step ended."""
        self._ends.append(time.perf_counter())

    def median(self) -> float:
        """Without the first steps, which warm up."""
        ends = self._ends[len(self._ends) // 10 :]
        return statistics.median(after - before for before, after in itertools.pairwise(ends))
