"""The reasons for which a process ends before its run is complete."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

from onstep.training.runs.allocation_limit import AllocationLimit
from onstep.training.runs.signals import DistributedSignalHandler

ExitKind = Literal["signal", "allocation", "duration", "straggler", "interval"]


@dataclass
class ExitWatch:
    """The reasons to end the process early, on which ranks agree."""

    handler: DistributedSignalHandler | None = None
    """None outside of a run and without `train.exit_signal_handler`."""
    deadline: float | None = None
    """When the limit `train.exit_duration_in_mins` expires, in seconds of the monotonic clock."""
    allocation: AllocationLimit | None = None
    """That of the SLURM job; on rank 0."""
    decided: ExitKind | None = None
    straggler: str = ""
    """Describes the rank that is so slow that the run should end; otherwise empty."""

    @property
    def is_preempted(self) -> bool:
        """Whether the process has to end, by a signal or since its allocation ends: another one continues the run."""
        return self.decided in ("signal", "allocation")

    def of_next_run(self) -> ExitWatch:
        """The watch of a run that begins after an earlier one; a preemption is for all runs of the process."""
        return replace(self, decided=self.decided if self.is_preempted else None, straggler="")

    def start(self, exit_duration_in_mins: float | None, start_time: float) -> None:
        """Start the clock of `train.exit_duration_in_mins` unless already running."""
        if exit_duration_in_mins is not None and self.deadline is None:
            self.deadline = time.monotonic() + 60 * exit_duration_in_mins - (time.time() - start_time)

    def votes(self, is_main: bool) -> list[int]:
        """The status of this rank: a signal was received; the allocation ends; the time is up (both by rank 0's clock);
        a rank is too slow."""
        signalled = self.handler is not None and self.handler.received
        is_late = self.deadline is not None and is_main and time.monotonic() >= self.deadline
        is_ending = self.allocation is not None and self.allocation.is_near()
        return [int(signalled), int(is_ending), int(is_late), int(bool(self.straggler))]

    def set_agreed(self, votes: list[int]) -> None:
        """Apply the votes of all ranks, of which the first has priority."""
        signalled, is_ending, is_late, is_slow = votes
        if signalled:
            self.decided = "signal"
        elif is_ending and self.decided is None:
            self.decided = "allocation"
        elif is_late and self.decided is None:
            self.decided = "duration"
        elif is_slow and self.decided is None:
            self.decided = "straggler"
