"""How long a run has taken and will still take."""

from __future__ import annotations

import time

from onstep.errors import ConfigError
from onstep.progress import TrainState

SECONDS_OF_UNIT = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
"""The units that `report_runtime` counts in."""


def report_runtime(
    train_state: TrainState,
    start_time: float,
    seq_length: int,
    train_iters: int,
    time_unit: str = "seconds",
    *,
    start_step: int = 0,
    now: float | None = None,
) -> dict[str, float]:
    """Progress and time of a run, with an estimate of what remains at the pace of this process so far.

    Args:
        train_state: progress of the whole run, over all its restarts.
        start_time: unix seconds when this process began to train.
        seq_length: tokens of a sequence.
        train_iters: steps of the whole run.
        time_unit: seconds, minutes, hours or days.
        start_step: step that this process continued from. `train_state.step` counts the steps of earlier processes
            too, whose time is not in `now - start_time`.
        now: unix seconds; None reads the clock.

    Returns:
        `time/remaining_estimate` (absent before this process has done a step), `time/tokens`, `time/samples`,
        `time/batches` and `time/total`, which is the time of this process.

    Raises:
        ConfigError: for another unit.
    """
    if time_unit not in SECONDS_OF_UNIT:
        units = ", ".join(SECONDS_OF_UNIT)
        raise ConfigError(f"the unit of time must be one of {units}, got {time_unit!r}; set logger.runtime_time_unit.")
    unit = SECONDS_OF_UNIT[time_unit]
    elapsed = (time.time() if now is None else now) - start_time
    steps_here = train_state.step - start_step
    report: dict[str, float] = {}
    if steps_here > 0:
        report["time/remaining_estimate"] = elapsed / steps_here * max(0, train_iters - train_state.step) / unit
    return report | {
        "time/tokens": train_state.consumed_train_samples * seq_length,
        "time/samples": train_state.consumed_train_samples,
        "time/batches": train_state.step,
        "time/total": elapsed / unit,
    }
