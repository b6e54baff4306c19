"""Defines how far a training has come, how its run ends, and the limits of a run's timed sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onstep.events import Request


@dataclass
class RunStage:
    """The stage of the current or last training of a run."""

    has_stepped: bool = False
    """Whether this process has completed a step of it."""
    epoch_is_open: bool = False
    """True between `on_epoch_start` and `on_epoch_end`."""
    data_exhausted: bool = False
    final_metrics_logged: bool = False
    """Whether its final metrics are logged."""


Reason = Literal["completed", "stopped", "preempted", "failed"]
"""How a run ends."""


@dataclass
class RunEnding:
    """The end of a run: the events fired so far, and the reason. `run_scope` makes a new one for each run."""

    in_run: bool = False
    """Whether something will fire the events of the end."""
    training: Literal["before", "during", "after"] = "before"
    """Whether `on_train_start` and `on_train_end` have fired."""
    was_stopped: bool = False
    """Whether a callback ended the run early."""
    stopped_by: Request | None = None
    """Who requested the stop that is decided, or that ended the training."""
    by_anomaly: bool = False
    """The anomaly gate's policy `stop` ended the run; the command line exits with code 1."""
    ended: Reason | None = None
    """How the run ended, as passed to `on_run_end`."""
    lacks_data: bool = False
    """The data of the next step cannot be read, which all ranks know; no rank is within the step."""
    error: str | None = None
    """The error that ended the run, if it failed; set once `on_exception` is about to fire."""
    first_failure: str | None = None
    """The watchdog's diagnosis: which rank was first to fail or hang, and where."""


class SectionLimits(dict[str, float]):
    """Learned time limits without progress, in seconds, by the timed section of a run."""
