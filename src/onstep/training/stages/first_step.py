"""Shortens the time limit of collectives once the first step of a training is done."""

from __future__ import annotations

from onstep.distributed.timeouts import seconds_after_first_step
from onstep.training.run import Run


def limit_collectives(run: Run) -> None:
    """From now on until the training ends, a collective waits for other ranks for a shorter time."""
    seconds = seconds_after_first_step(run.cfg, is_own=run.world.timeout_minutes is not None)
    if seconds is not None and run.world.size > 1:
        run.world.limit(seconds)
