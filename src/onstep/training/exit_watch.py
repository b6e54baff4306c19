"""What ends the process before the run is done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from onstep.training.signals import DistributedSignalHandler

ExitKind = Literal["signal", "duration", "straggler", "interval"]


@dataclass
class ExitWatch:
    """What ends the process before the run is done, and what a pending save waits for; ranks agree on it."""

    handler: DistributedSignalHandler | None = None
    """None outside of a run and where `train.exit_signal_handler` is off."""
    deadline: float | None = None
    """When `train.exit_duration_in_mins` is over, in seconds of the monotonic clock."""
    decided: ExitKind | None = None
    is_said: bool = False
    """Why the process leaves has been printed."""
    straggler: str = ""
    """Which rank is so slow that the run is to end, in words; nothing otherwise."""
    some_rank_writes: bool = False
    """Whether a rank is still writing its files of an asynchronous save."""

    def start(self, exit_duration_in_mins: float | None, start_time: float) -> None:
        """Forget an earlier decision, and start the clock of `train.exit_duration_in_mins` if it does not run yet."""
        if self.decided != "signal":
            self.decided = None
        self.is_said, self.straggler = False, ""
        if exit_duration_in_mins is not None and self.deadline is None:
            self.deadline = time.monotonic() + 60 * exit_duration_in_mins - (time.time() - start_time)

    def votes(self, is_main: bool, writes: bool) -> list[int]:
        """What this rank knows: a signal came; the time is over (rank 0's clock); a rank is too slow; its save is not
        written yet."""
        signalled = self.handler is not None and self.handler.received
        is_late = self.deadline is not None and is_main and time.monotonic() >= self.deadline
        return [int(signalled), int(is_late), int(bool(self.straggler)), int(writes)]

    def adopt(self, votes: list[int]) -> None:
        """Take the votes of all ranks; a signal wins over the clock, and that over a slow rank."""
        signalled, is_late, is_slow, writes = votes
        if signalled:
            self.decided = "signal"
        elif is_late and self.decided is None:
            self.decided = "duration"
        elif is_slow and self.decided is None:
            self.decided = "straggler"
        self.some_rank_writes = bool(writes)
