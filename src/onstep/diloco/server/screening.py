"""Finds submissions that are far larger than the others, so that one broken worker does not decide a round."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FAR = 20.0
"""Times the median of the others from which a submission is held back."""
NUM_REMEMBERED = 8
"""Submissions of earlier rounds that the next ones are compared with."""
LEAST_OTHERS = 2
"""Without so many others, nothing is held back."""


@dataclass(frozen=True)
class Size:
    """The norm of a submission."""

    norm: float
    steps: int

    @property
    def for_a_step(self) -> float:
        """Comparable between submissions of different lengths: between the growth of a walk and of a straight line."""
        return self.norm / math.pow(max(1, self.steps), 0.75)


class Screening:
    """Compares the submissions of a fragment with each other, and with those of the last rounds."""

    def __init__(self) -> None:
        self._earlier: deque[float] = deque(maxlen=NUM_REMEMBERED)

    def far(self, sizes: Sequence[Size]) -> dict[int, str]:
        """The submissions of a round, by index, that are far from the others, with the reason; then remembers all.

        Those that are held back are remembered as well: when all submissions grow for good, they count again.
        """
        comparable = [one.for_a_step for one in sizes]
        found = {}
        for index, size in enumerate(comparable):
            others = [*comparable[:index], *comparable[index + 1 :], *self._earlier]
            usual = sorted(others)[(len(others) - 1) // 2] if len(others) >= LEAST_OTHERS else math.inf
            if size > FAR * usual > 0.0:
                found[index] = f"its norm {sizes[index].norm:.3g} is {size / usual:.3g} times that of the others"
        self._earlier.extend(comparable)
        return found
