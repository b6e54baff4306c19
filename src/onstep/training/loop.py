"""What every part of the training loop works with, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from onstep.training.anomalies import AnomalyWatch
from onstep.training.housekeeping import Housekeeping
from onstep.training.interval import IntervalMeter
from onstep.training.interval_time import start_interval
from onstep.training.log_step import RunStart
from onstep.training.state import GlobalState
from onstep.training.step import train_step
from onstep.training.step_reporter import StepReporter
from onstep.training.telling import Teller

Evaluation = Callable[[], None]


@dataclass
class Loop:
    """What every part of the loop works with."""

    forward_step_func: Callable[..., Any]
    raw_forward_step_func: Callable[..., Any]
    model: list[nn.Module]
    optimizer: Any
    scheduler: Any
    reader: Any
    valid_data_iterator: Any
    state: GlobalState
    tell: Teller
    meter: IntervalMeter
    watch: AnomalyWatch
    start: RunStart
    evaluation: Evaluation | None = None
    reporter: StepReporter | None = None
    """What prints console lines and fills trackers; None where nobody wants them."""
    housekeeping: Housekeeping | None = None
    """What is done after each step beside training; None where all of it is off."""
    process_non_loss_data_func: Callable[..., Any] | None = None
    non_loss_data_func: Callable[..., Any] | None = None
    train_step: Callable[..., Any] = train_step
    """The step, perhaps in a wrapper that measures it."""
    position_before: dict[str, Any] | None = None
    """Where the reader stood before the step's micro-batches were read; kept only where a step may be rerun."""


def begin_reports(loop: Loop) -> None:
    """Start the time of the logging interval, of one that goes on less what it had taken."""
    if loop.reporter is not None:
        loop.reporter.begin()
    else:
        loop.state.interval_start = loop.state.clock.elapsed()
    start_interval(loop.state)


def is_finished(state: GlobalState) -> bool:
    """Whether the run has its steps, or somebody asked for its end."""
    control = state.control
    if control.should_training_stop or control.should_abort_without_save or state.data_exhausted:
        return True
    return state.exits.decided is not None or has_all_steps(state)


def has_all_steps(state: GlobalState) -> bool:
    """Whether the configured number of steps is done, or of epochs: one that was ended early counts as one."""
    limit, num_epochs, progress = state.train_iters, state.cfg.train.num_epochs, state.train_state
    if num_epochs is not None and progress.epoch >= num_epochs:
        return True
    return limit is not None and progress.step >= limit
