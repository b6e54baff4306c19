"""Says when a run has to save so that its checkpoint is written before its SLURM allocation ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from onstep.slurm.allocation import Allocation

_RECENT_STEPS = 20


@dataclass
class AllocationLimit:
    """The time until which a run may train in an allocation, from how long its steps and saves last."""

    allocation: Allocation
    ends_at: float
    """Seconds since the epoch."""
    margin_seconds: float
    save_seconds: float = 0.0
    """How long a save lasts until its checkpoint is complete, at most so far."""
    seconds_to_upload: Callable[[], float] = lambda: 0.0
    """How long it then lasts until the checkpoint is in the run's object store."""
    _asked_at: float | None = None
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    """Seconds between the last questions, one of which is asked at each step."""

    @property
    def seconds_left(self) -> float:
        """Until the end of the allocation."""
        return self.ends_at - time.time()

    @property
    def seconds_needed(self) -> float:
        """For one more step, a save and its upload, with the margin."""
        longest_step = max(self._steps, default=0.0)
        return self.margin_seconds + self.save_seconds + self.seconds_to_upload() + longest_step

    def start(self) -> None:
        """The first step begins."""
        self._asked_at = time.monotonic()

    def is_near(self) -> bool:
        """Whether the run has to save now. Asked once a step; SLURM is asked again before it says so."""
        now = time.monotonic()
        if self._asked_at is not None:
            self._steps.append(now - self._asked_at)
        self._asked_at = now
        if self.seconds_left > self.seconds_needed:
            return False
        self.ends_at = self.allocation.ends_at() or self.ends_at  # a limit may have been changed
        return self.seconds_left <= self.seconds_needed
