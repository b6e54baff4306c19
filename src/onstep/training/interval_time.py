"""Printing the times of whole parts of a run."""

from __future__ import annotations

from collections.abc import Sequence

from onstep.training.run import Run

_NOBODY = -1


def print_timers(run: Run, names: Sequence[str], normalizer: float = 1.0) -> None:
    """Print times as Megatron Bridge does, on the last rank. Collective.

    Where a callback shows progress, only if timers were asked for (`logger.timing_log_level` above 0).
    """
    is_shown = run.door.prints_console_line or run.cfg.logger.timing_log_level > 0
    run.timers.log(names, rank=None if is_shown else _NOBODY, normalizer=normalizer)
