"""Ends a run's training: logs the reason and the final metrics, saves the last checkpoint, handles early exits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from onstep.data import StepSource
from onstep.errors import DataError
from onstep.events import Request
from onstep.training.protocols import StateDict
from onstep.training.run import Run
from onstep.training.runs.signals import Preempted
from onstep.training.stages.actions import save_and_exit_if_due
from onstep.training.stages.agreement import write_decision
from onstep.training.stages.exits import announce_exit, save_and_time
from onstep.training.stages.job import Job
from onstep.training.stages.record import advance_tokens, final_metrics, first_and_last_loss, publish

logger = logging.getLogger(__name__)


class Leave(SystemExit):
    """A decision, the same on all ranks, to exit within a step; it may still save.

    Args:
        code: exit code of the process.
        decision: the decision to record, about the step that is abandoned.
        position: the data position to save; None saves nothing.
        save_reason: why that checkpoint is written.
    """

    def __init__(self, code: int, decision: Request, position: StateDict | None = None, save_reason: str = ""):
        super().__init__(code)
        self.decision, self.position, self.save_reason = decision, position, save_reason


def leave_early(job: Job, leave: Leave) -> None:
    """Save what an early exit requires, and record its decision. The abandoned step is not counted. Collective.

    Raises:
        Leave: always.
    """
    run, checkpoints = job.run, job.run.checkpoints
    if leave.position is not None:
        start_of_step = _FixedPosition(leave.position, job.reader.position_is_shared)
        save_now(job, leave.save_reason, cast(StepSource, start_of_step))
        if checkpoints is not None:
            checkpoints.finish()
    leave.decision.details["checkpoint"] = leave.position is not None and checkpoints is not None
    write_decision(run, leave.decision, run.train_state.step + 1)
    raise leave


@contextmanager
def early_end(job: Job) -> Iterator[None]:
    """Save what is finished where training leaves early, or where the data of a step cannot be read."""
    try:
        yield
    except Leave as leave:  # decided identically on all ranks, so it may still save
        leave_early(job, leave)
    except DataError:
        save_without_data(job)
        raise


def save_without_data(job: Job) -> None:
    """Save the finished steps where the data of the next one cannot be read and its place is known. Collective."""
    run, reader = job.run, job.reader
    if run.ending.lacks_data and reader.position_is_shared and run.is_unsaved:
        save_now(job, "the data of the next step cannot be read")
        if run.checkpoints is not None:
            run.checkpoints.finish()


def conclude(job: Job) -> None:
    """Log why training ended and its final metrics, and save; an aborted run logs and saves nothing more."""
    run, control, ending = job.run, job.run.control, job.run.ending
    if run.leaves:
        announce_exit(run)
    run.features.settle()
    run.features.concluding()
    stopped_before_the_end = control.should_training_stop and not run.has_all_steps
    ending.was_stopped = run.leaves or control.should_abort_without_save or stopped_before_the_end
    run.info.history.losses_at_exit = first_and_last_loss(run) if run.leaves and run.world.is_main else {}
    if not ending.was_stopped:
        ending.stopped_by = None
    if run.world.is_main and not run.leaves:
        why = f"stopped: {ending.stopped_by}" if ending.was_stopped else "all steps done"
        why = "no more data" if run.stage.data_exhausted else why
        level = logging.WARNING if control.should_abort_without_save else logging.INFO
        level = level if ending.was_stopped or run.stage.data_exhausted else logging.DEBUG
        logger.log(level, "training ended at step %d: %s", run.train_state.step, why)
    if not control.should_abort_without_save and not run.leaves:
        publish_final_metrics(job)
        save_at_end(job)
    if run.checkpoints is not None:
        run.checkpoints.finish()


def publish_final_metrics(job: Job) -> None:
    """Log the final metrics once: a run that ended, was killed and is restarted has already logged them."""
    run = job.run
    if run.stage.final_metrics_logged:
        return
    rest = job.accumulator.flush()
    if rest is not None:
        advance_tokens(run, rest)
    metrics = run.features.wrap("final_metrics", final_metrics)(run, job.start)
    job.notify.on_final_metrics(logs=metrics)
    run.info.history.final_metrics = metrics  # also where the user's own `log` drops the record
    publish(run, metrics, job.notify)
    run.stage.final_metrics_logged = True


def save_at_end(job: Job) -> None:
    """Save the state at the end of training, so that the run can be extended.

    Not after the policy `stop`: an accelerator reports a bad step late, and the counters may be ahead of the weights.
    """
    run = job.run
    saves = run.checkpoints is not None and run.cfg.checkpoint.save_at_end and not run.ending.by_anomaly
    if saves and run.is_unsaved:
        save_now(job, "training ended")


def save_now(job: Job, reason: str, reader: StepSource | None = None) -> None:
    """Save the current state, with the data at the reader's position. Collective."""
    flops = job.run.train_state.floating_point_operations_so_far
    save_and_time(job.run, job.trained, job.reader if reader is None else reader, flops, reason=reason)


def give_up_on_data(job: Job) -> None:
    """Save without the missing batch, when no data arrives and a signal has requested the exit.

    Raises:
        Preempted: if there are other ranks. They may be in the middle of the step, so no agreement is possible; the
            run will continue from its newest checkpoint.
    """
    run = job.run
    if run.world.size > 1:
        raise Preempted(
            f"{run.world.place()} waited {run.cfg.train.data_timeout} s for data after a signal; the run exits "
            f"without saving and will continue from its newest checkpoint."
        )
    run.exits.decided = "signal"
    save_and_exit_if_due(job)


@dataclass(frozen=True)
class _FixedPosition:
    """A reader that has read nothing: its position is the start of the step."""

    position: StateDict
    position_is_shared: bool

    def state_dict(self) -> StateDict:
        return self.position


def exit_if_preempted(run: Run) -> None:
    """End the process if a signal or the end of its allocation requires it, with the exit code that asks for a restart.

    Raises:
        Preempted: a SystemExit with code 75.
    """
    if run.exits.is_preempted:
        raise Preempted(f"preempted at step {run.train_state.step}; the same command continues the run")
