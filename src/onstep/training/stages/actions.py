"""Marks what is due or requested at the end of a step or epoch, and does it: roll back, log, evaluate, save, exit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace

from onstep.checkpoint import CheckpointInfo
from onstep.commands import MOST_LR_FACTOR
from onstep.errors import AnomalyError, warn_once
from onstep.events import Request
from onstep.events.control import FLAGS, STICKY
from onstep.train_state import TrainState
from onstep.training.feature import is_due
from onstep.training.reporting.timers import INTERVAL_TIME
from onstep.training.run import Run
from onstep.training.runs.decisions import DecisionLog
from onstep.training.stages.agreement import agree, refuse, shorten_ids, write_decision
from onstep.training.stages.best_metric import note_best_metric, save_best
from onstep.training.stages.data_position import leave_out_skipped
from onstep.training.stages.evaluation_report import evaluate_and_print_results
from onstep.training.stages.exits import (
    CurrentEvaluation,
    EvaluationInterrupted,
    random_state_before,
    restore_random_state,
    save_and_decide_exit,
)
from onstep.training.stages.job import Job, warn_of_missing_gradients, warn_of_parameters_left_out
from onstep.training.stages.record import log_step, publish

logger = logging.getLogger(__name__)


def mark_due(run: Run) -> None:
    """Mark in the control what is due at this step; callbacks may veto it there."""
    validation, step, set_now = run.cfg.validation, run.train_state.step, run.train_state.overrides
    log_every = set_now.get("log_interval", run.cfg.logger.log_interval)
    eval_every = set_now.get("eval_interval", validation.eval_interval)
    logs = is_due(step, log_every) or (step == 1 and run.cfg.logger.log_first_step)
    first_evaluated = validation.start_eval_at_iter or 0
    evaluates = is_due(step, eval_every, start=first_evaluated)
    if evaluates:
        run.evaluated.due_at_step = step
    if run.features.evaluates_last_step and step >= first_evaluated and run.has_all_steps:
        evaluates = True
    save_every = set_now.get("save_interval", run.cfg.checkpoint.save_interval)
    saves = run.checkpoints is not None and is_due(step, save_every)
    if logs or evaluates or saves:
        run.control.set_due(log=logs, evaluate=evaluates or (saves and validation.eval_on_save), save=saves)


def mark_due_after_an_epoch(run: Run) -> None:
    """Mark in the control what is due at the end of an epoch; callbacks may veto it there."""
    validation = run.cfg.validation
    saves = run.checkpoints is not None and run.cfg.checkpoint.save_each_epoch
    evaluates = validation.eval_each_epoch and run.trainer_state.epoch >= (validation.start_eval_at_epoch or 0)
    if evaluates and run.trainer_state.epoch % 1 == 0:
        run.evaluated.due_at_step = run.train_state.step
    run.control.set_due(
        log=run.cfg.logger.log_on_each_epoch,
        evaluate=evaluates or (saves and validation.eval_on_save),
        save=saves,
    )


def act(job: Job) -> bool:
    """Agree on what is due or requested and do it, in order: roll back, log, evaluate, save, exit. Collective.

    Returns whether the run was rolled back.

    An aborted run does none of this. A process that is about to exit does not start an evaluation: its checkpoint still
    lists it as pending.
    """
    run, on, control = job.run, job.run.features, job.run.control
    agree(run)
    if run.checkpoints is not None and run.checkpoints.is_saving:
        run.checkpoints.finalize_if_written()
    if control.should_abort_without_save:
        return False
    on.before_acting()
    request = control.rollback_request
    if request is not None and roll_back(job, request):
        if control.should_save:  # before the stop that was requested with it
            save_and_exit_if_due(job)
        return True
    on.after_agreement()
    if job.instead_of_due is not None:
        job.instead_of_due(job)
    elif control.should_log or control.should_evaluate or control.should_save or may_exit(job):
        do_what_is_due(job)
    return False


def act_of(job: Job) -> Callable[[Job], bool]:
    """`act` for a job, whose features may do what is due in their own way."""
    due: Callable[[Job], object] = job.run.features.wrap("due", do_what_is_due)
    job.instead_of_due = None if due is do_what_is_due else due
    return act


def may_exit(job: Job) -> bool:
    """Whether a save or an exit may be due without a request."""
    return job.run.exits.decided is not None or job.decides_at_every_step


def do_what_is_due(job: Job) -> None:
    """Log, evaluate, save and exit, whatever of it is due. Collective, right after an agreement."""
    run, on, control = job.run, job.run.features, job.run.control
    if control.should_log:
        control.clear("should_log")
        on.settle()
        on.before_log()
        log_step(run, job.accumulator, job.optimizer, job.notify)
        warn_of_missing_gradients(job)
        warn_of_parameters_left_out(job)
        agree(run)
    if control.should_evaluate and not run.leaves:
        control.clear("should_evaluate")
        on.settle()
        evaluate_unless_interrupted(job)
        agree(run)
    if control.should_save or may_exit(job):
        save_and_exit_if_due(job)


def save_and_exit_if_due(job: Job) -> None:
    """Save what is due, and let `run.exits` decide whether the process exits. Collective.

    Requests that arrive during a save are agreed on right after it, so that a signal then causes no second checkpoint.
    """
    run = job.run
    was_unsaved, is_due_now = run.is_unsaved, run.control.should_save
    is_temporary_due = is_due(run.train_state.step, run.cfg.checkpoint.non_persistent_save_interval)
    if is_due_now or is_temporary_due or run.leaves:
        run.features.settle()
    if run.ending.by_anomaly:  # the counters may be ahead of the weights
        run.control.clear("should_save")
        return
    saves_at_end = run.cfg.checkpoint.save_at_end and run.is_over and not run.leaves
    _save_and_exit(job, saves_at_end)
    has_saved = (is_due_now and not saves_at_end) or (was_unsaved and not run.is_unsaved)
    if has_saved and not run.leaves:
        agree(run)
        if run.leaves:
            _save_and_exit(job, saves_at_end)


def _save_and_exit(job: Job, saves_at_end: bool) -> None:
    flops = job.run.train_state.floating_point_operations_so_far
    save_and_decide_exit(job.run, job.trained, job.reader, flops, saves_at_end=saves_at_end)


def evaluate_unless_interrupted(job: Job) -> None:
    """Evaluate; if a signal interrupts it, restore the state from before, so that the resumed run evaluates again."""
    run = job.run
    random_state = random_state_before(run)
    try:
        run_evaluation(job)
    except EvaluationInterrupted:
        run.control.set_due(log=False, evaluate=True, save=False)
        restore_random_state(run, random_state)


def run_evaluation(job: Job) -> None:
    """Evaluate inside the loop; excluded from the interval's time."""
    run = job.run
    run.features.renew(CurrentEvaluation)
    with run.features.pause("evaluate"), run.timers("eval-time").measure(barrier=True):
        run.features.wrap("evaluate", lambda: _evaluate_validation_set(job))()
    run.evaluated.at_step = run.train_state.step


def _evaluate_validation_set(job: Job) -> None:
    run = job.run
    if job.valid_data_iterator is not None:
        evaluate_and_print_results(
            run,
            f"iteration {run.train_state.step}",
            job.raw_forward_step_func,
            job.valid_data_iterator,
            job.model,
            run.cfg.model,
            process_non_loss_data_func=job.process_non_loss_data_func,
            non_loss_data_func=job.non_loss_data_func,
            notify=job.notify,
        )
        if note_best_metric(run, run.evaluated.last_metrics):
            save_best(run)
    elif run.world.is_main:
        warn_once(logger, "no evaluation is run, although one is due or requested: there is no validation data")


@dataclass(frozen=True)
class RollBack:
    """A decided rollback: weights, optimizer, scheduler and random state come from a checkpoint, the data continues.

    Data resumes after the bad step: the samples between the checkpoint and the bad step, which the abandoned branch
    was trained on, are skipped with it.
    """

    bad_step: int
    """The step that is undone."""
    last_good_step: int
    """The newest step whose checkpoint may be loaded."""
    request: Request
    """Who requested it, and why."""
    lr_factor: float
    """The learning-rate factor from here on."""
    abandoned: TrainState
    """A copy of the progress of the abandoned branch."""
    refused: str | None = None
    """Why a callback does not allow it."""

    @classmethod
    def at(cls, run: Run, request: Request) -> RollBack:
        """The requested rollback, given the run right after the step."""
        progress, factor = run.train_state, run.cfg.anomaly.rollback_lr_factor
        bad_step: int = request.details.get("bad_step", progress.step)
        to_step = request.details.get("to_step")
        last_good_step = bad_step - 1 if to_step is None else to_step
        lr_factor = progress.overrides.get("lr_factor", 1.0) * request.details.get("lr_factor", factor)
        return cls(bad_step, last_good_step, request, lr_factor, deepcopy(progress), run.control.no_rollback)

    def carry_over(self, progress: TrainState) -> None:
        """Copy into the loaded `progress` what is not undone.

        That is the data position with its counters, the skip list, the numbers of skips and rollbacks, and every value
        set at run time. The samples that the rollback skips count as skipped.
        """
        left = self.abandoned
        passed_over = left.consumed_train_samples - progress.consumed_train_samples
        progress.skipped_train_samples += passed_over
        for name in ("epoch", "samples_in_epoch", "steps_in_epoch", "consumed_train_samples"):
            setattr(progress, name, getattr(left, name))
        progress.num_skips, progress.num_rollbacks = left.num_skips, left.num_rollbacks
        progress.skip_list[:] = left.skip_list
        progress.overrides.clear()
        progress.overrides.update(left.overrides)
        if self.lr_factor != 1.0 or "lr_factor" in left.overrides:
            progress.overrides["lr_factor"] = self.lr_factor

    def record(self, to_step: int) -> Request:
        """The decision as recorded when done: the progress is now at `to_step`."""
        details = {"bad_step": self.bad_step, "to_step": to_step, "lr_factor": self.lr_factor}
        return replace(self.request, flag="rolled_back", details={**self.request.details, **details})

    @property
    def is_too_fast(self) -> bool:
        """Whether the factors of all rollbacks together exceed what can be set."""
        return self.lr_factor > MOST_LR_FACTOR

    @property
    def lacking(self) -> str:
        """Why it cannot be done, if it cannot."""
        if self.refused is not None:
            return self.refused
        if self.is_too_fast:
            return f"it would multiply the learning rate by {self.lr_factor:g}, above the limit of {MOST_LR_FACTOR:g}"
        return f"no verified checkpoint of step {self.last_good_step} or earlier exists"

    def impossible(self) -> AnomalyError:
        """The error for a run that cannot roll back."""
        why = shorten_ids(self.request.reason or str(self.request))
        if self.refused is not None:
            return AnomalyError(f"step {self.bad_step} must be undone ({why}), but {self.refused}.")
        remedy = (
            "lower anomaly.rollback_lr_factor" if self.is_too_fast else "save more often with checkpoint.save_interval"
        )
        return AnomalyError(
            f"step {self.bad_step} must be undone ({why}), but {self.lacking}; {remedy}, or skip such steps with "
            f"train.on_nonfinite=skip."
        )


def roll_back(job: Job, request: Request) -> bool:
    """Undo a bad step: load the newest verified checkpoint before it and continue with the data after it. Collective.

    A request from outside that cannot be met is refused, and training continues. Returns whether the step was undone.

    Raises:
        AnomalyError: if no such checkpoint exists, after more than `anomaly.max_rollbacks` rollbacks, or if they would
            multiply the learning rate by too much.
    """
    run, checkpoints, progress = job.run, job.run.checkpoints, job.run.train_state
    if not request.is_steered:
        progress.num_rollbacks += 1
        run.features.before_rollback(request.details.get("bad_step", progress.step), request)
    rollback = RollBack.at(run, request)
    info = None if rollback.is_too_fast or rollback.refused else _checkpoint_to_load(run, rollback)
    if run.world.is_main:
        _warn_if_it_differs(rollback, info)
    if info is None and request.is_steered:
        run.control.rollback_request = None
        refuse(run, request, rollback.lacking)
        return False
    if checkpoints is None or info is None:
        raise rollback.impossible()
    with run.features.pause("rollback"), _keep_ends(run):
        checkpoints.restore(info, job.trained)
    rollback.carry_over(progress)
    run.features.room(DecisionLog).branch += 1
    run.control.rollback_request = None
    write_decision(run, rollback.record(progress.step))
    run.features.rolled_back(rollback.bad_step, request)
    leave_out_skipped(job)
    record = {"rolled_back_from": rollback.bad_step, "anomaly": request.reason or str(request)}
    publish(run, {"epoch": run.trainer_state.epoch, **record}, job.notify)
    restart_interval(job)
    return True


def _warn_if_it_differs(rollback: RollBack, info: CheckpointInfo | None) -> None:
    """Say that a rollback which is repeated cannot go where it went."""
    went_to = rollback.request.details.get("went_to")
    if went_to is None or (info is not None and info.step == went_to):
        return
    logger.warning(
        "the rollback after step %d, which is repeated, went to step %s%s, so the run differs from the one that was "
        "interrupted",
        rollback.bad_step,
        went_to,
        f"; it is not done, because {rollback.lacking}"
        if info is None
        else f", whose checkpoint is not there any more; it goes to step {info.step}",
    )


@contextmanager
def _keep_ends(run: Run) -> Iterator[None]:
    """Keep the ends that are decided, of the run and of the epoch: a rollback undoes steps, not the wish to stop.

    What else was due at the undone step is dropped, except a save that was requested with a stop.
    """
    control, stopped_by, epoch_is_open = run.control, run.ending.stopped_by, run.stage.epoch_is_open
    stops = any(getattr(control, flag) for flag in STICKY)
    flags = ("should_epoch_stop", *STICKY, "should_save") if stops else ("should_epoch_stop",)
    kept = [flag for flag in flags if getattr(control, flag)]
    yield
    for flag in FLAGS:
        (control.set_flag if flag in kept else control.clear)(flag)
    run.ending.stopped_by, run.stage.epoch_is_open, run.stage.final_metrics_logged = stopped_by, epoch_is_open, False


def _checkpoint_to_load(run: Run, rollback: RollBack) -> CheckpointInfo | None:
    """The newest verified checkpoint that a rollback may load. Collective."""
    if run.checkpoints is None:
        return None
    branch = run.features.room(DecisionLog).branch
    return run.checkpoints.to_go_back_to(rollback.last_good_step, rollback.request.details.get("went_to"), branch)


def restart_interval(job: Job) -> None:
    """Restart the clock of the logging interval and of everything measured over it."""
    timer = job.run.timers(INTERVAL_TIME)
    job.run.interval.start = job.run.clock.elapsed()
    job.run.features.restart_interval()
    timer.restart()
