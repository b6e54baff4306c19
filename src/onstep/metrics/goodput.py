"""Which seconds of training counted: those of steps whose update was applied and is still there."""

from __future__ import annotations


class CountedSeconds:
    """Sums the seconds of steps, and takes back those of steps that a rollback has undone.

    Args:
        start_step: completed steps when the process began; going back to it undoes everything.
    """

    def __init__(self, start_step: int) -> None:
        self.total = 0.0
        """Seconds of all steps that count so far."""
        self.in_interval = 0.0
        """The part of them since the last `next_interval`."""
        self._steps = self._counted_steps = 0
        self._at_step = {start_step: 0.0}

    def add_step(self, seconds: float, is_applied: bool) -> None:
        """A step took `seconds`; one whose update was left out does not count."""
        self._steps += 1
        if is_applied:
            self._counted_steps += 1
            self._add(seconds)

    def add_wait(self, seconds: float) -> None:
        """The device took `seconds` more for the steps of this interval; counts as far as they do."""
        if self._steps:
            self._add(seconds * self._counted_steps / self._steps)

    def mark(self, step: int) -> None:
        """Training may come back to here: a checkpoint is taken."""
        self._at_step[step] = self.total

    def go_back(self, step: int) -> None:
        """What came after `step` is undone; a step without a mark stands for the nearest mark before it."""
        marks = [marked for marked in self._at_step if marked <= step]
        kept = self._at_step[max(marks)] if marks else 0.0
        undone, self.total = self.total - kept, kept
        self.in_interval = max(0.0, self.in_interval - undone)
        self._at_step = {marked: seconds for marked, seconds in self._at_step.items() if marked <= step}

    def next_interval(self) -> None:
        """Begin a new interval; what was counted stays counted."""
        self.in_interval = 0.0
        self._steps = self._counted_steps = 0

    def _add(self, seconds: float) -> None:
        self.total += seconds
        self.in_interval += seconds
