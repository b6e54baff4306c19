"""What is due or asked for at the end of a step or an epoch, and doing it: go back, log, evaluate, save, leave."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

from onstep.errors import AnomalyError
from onstep.events import Request
from onstep.progress import TrainState
from onstep.training.anomalies.anomaly import shorten_ids
from onstep.training.reporting.timers import INTERVAL_TIME
from onstep.training.run import Run
from onstep.training.stages.agreement import agree, write_decision
from onstep.training.stages.data_position import apply_overrides, leave_out_skipped
from onstep.training.stages.evaluation import evaluate_and_print_results, note_best_metric
from onstep.training.stages.exits import (
    EvaluationInterrupted,
    checkpoint_and_decide_exit,
    random_state_before,
    restore_random_state,
)
from onstep.training.stages.job import Job
from onstep.training.stages.record import log_step, publish


def mark_due(run: Run) -> None:
    """Put into the control what is due at this step, where callbacks may veto it."""
    validation, step, set_now = run.cfg.validation, run.train_state.step, run.train_state.overrides
    log_every = set_now.get("log_interval", run.cfg.logger.log_interval)
    eval_every = set_now.get("eval_interval", validation.eval_interval)
    logs = bool(log_every) and step % (log_every or 1) == 0
    first_evaluated = validation.start_eval_at_iter or 0
    evaluates = bool(eval_every) and step >= first_evaluated and step % (eval_every or 1) == 0
    if run.door.evaluates_last_step and step >= first_evaluated and run.has_all_steps:
        evaluates = True
    save_every = set_now.get("save_interval", run.cfg.checkpoint.save_interval)
    saves = run.checkpoints is not None and bool(save_every) and step % (save_every or 1) == 0
    logs = logs or (step == 1 and run.cfg.logger.log_first_step)
    if logs or evaluates or saves:
        run.control.fill(log=logs, evaluate=evaluates or (saves and validation.eval_on_save), save=saves)


def mark_due_after_an_epoch(run: Run) -> None:
    """Put into the control what is due when an epoch has ended, where callbacks may veto it."""
    validation = run.cfg.validation
    run.saving.is_unsaved = True
    saves = run.checkpoints is not None and run.cfg.checkpoint.save_each_epoch
    evaluates = validation.eval_each_epoch and run.trainer_state.epoch >= (validation.start_eval_at_epoch or 0)
    run.control.fill(
        log=run.cfg.logger.log_on_each_epoch,
        evaluate=evaluates or (saves and validation.eval_on_save),
        save=saves,
    )


def act(job: Job) -> None:
    """Agree on what is due or asked for, and do it: go back, log, evaluate, save, leave, in this order. Collective.

    An aborted run does none of it. A process that leaves does not begin an evaluation: that is still pending in its
    checkpoint.
    """
    run, on, control = job.run, job.run.features, job.run.control
    agree(run)
    if run.checkpoints is not None and run.checkpoints.manager.is_saving:
        run.checkpoints.finalize_if_written()
    if control.should_abort_without_save:
        return
    apply_overrides(job)
    request = control.rollback_request
    if request is not None:
        control.rollback_request = None
        roll_back(job, request)
        return
    on.after_agreement()
    if control.should_log:
        control.honoured("should_log")
        on.settle()
        on.before_log()
        log_step(run, job.meter, job.optimizer, job.tell)
        run.saving.is_unsaved = True
        agree(run)
    if control.should_evaluate and not run.leaves:
        control.honoured("should_evaluate")
        on.settle()
        evaluate_unless_interrupted(job)
        run.saving.is_unsaved = True
        agree(run)
    if control.should_save or run.exits.decided is not None or job.decides_at_every_step:
        save_and_decide_exit(job)


def save_and_decide_exit(job: Job) -> None:
    """Save what is due, and let `run.exits` say whether the process leaves. Collective.

    What came while a save ran is agreed on right after it, so that a signal then makes no second checkpoint.
    """
    run, saving = job.run, job.run.saving
    was_unsaved, is_due_now = saving.is_unsaved, run.control.should_save
    if is_due_now or run.leaves:
        run.features.settle()
    if run.ending.by_anomaly:  # the counters may be ahead of the weights
        run.control.honoured("should_save")
        return
    saving.saves_at_end = run.cfg.checkpoint.save_at_end and run.is_over and not run.leaves
    _save_and_decide_exit(job)
    has_saved = (is_due_now and not saving.saves_at_end) or (was_unsaved and not saving.is_unsaved)
    if has_saved and not run.leaves:
        agree(run)
        if run.leaves:
            _save_and_decide_exit(job)


def _save_and_decide_exit(job: Job) -> None:
    run = job.run
    flops = run.train_state.floating_point_operations_so_far
    checkpoint_and_decide_exit(run, job.model, job.raw_optimizer, job.scheduler, flops, None, job.reader)


def evaluate_unless_interrupted(job: Job) -> None:
    """Evaluate; where a signal ends it, put everything back to before it, so that the resumed run evaluates again."""
    run = job.run
    random_state = random_state_before(run)
    try:
        run_evaluation(job)
    except EvaluationInterrupted:
        run.control.fill(log=False, evaluate=True, save=False)
        restore_random_state(run, random_state)


def run_evaluation(job: Job) -> None:
    """Evaluate inside the loop, on the validation set or as the caller said; no time of the logging interval."""
    run = job.run
    run.evaluated.is_restartable = True
    with run.features.pause("evaluate"), run.timers("eval-time").measure(barrier=True):
        if job.evaluation is not None:
            job.evaluation()
        elif job.valid_data_iterator is not None:
            evaluate_and_print_results(
                run,
                f"iteration {run.train_state.step}",
                job.raw_forward_step_func,
                job.valid_data_iterator,
                job.model,
                run.cfg.model,
                process_non_loss_data_func=job.process_non_loss_data_func,
                non_loss_data_func=job.non_loss_data_func,
                tell=job.tell,
            )
            note_best_metric(run, run.evaluated.last_metrics)
    run.evaluated.at_step = run.train_state.step


@dataclass(frozen=True)
class RollBack:
    """A decided rollback: weights, optimizer, scheduler and random state come from a checkpoint, the data goes on.

    The data position is the one after the bad step: what lies between the checkpoint and the bad step, which the
    abandoned branch was trained on, is passed over with it.
    """

    bad_step: int
    """The step that is undone."""
    request: Request
    """Who asked, and why."""
    lr_factor: float
    """The learning-rate factor that holds from here on."""
    abandoned: TrainState
    """The progress of the branch that is left, as a copy."""

    @classmethod
    def at(cls, progress: TrainState, bad_step: int, request: Request, factor: float) -> RollBack:
        """The rollback of `bad_step`, with `progress` as it is after that step."""
        lr_factor: float = progress.overrides.get("lr_factor", 1.0) * factor
        return cls(bad_step, request, lr_factor, deepcopy(progress))

    @property
    def last_good_step(self) -> int:
        """A checkpoint of this step or an earlier one is to be loaded."""
        return self.bad_step - 1

    def carry_over(self, progress: TrainState) -> None:
        """Bring into the loaded `progress` what is not undone.

        That is the data position with its counters, the skip list, the numbers of skips and rollbacks, and every value
        that was set while running; the samples that are passed over count as skipped.
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
        """The decision as it is recorded, done: the progress is at `to_step` now."""
        details = {"bad_step": self.bad_step, "to_step": to_step, "lr_factor": self.lr_factor}
        return replace(self.request, flag="rolled_back", details={**self.request.details, **details})

    def without_checkpoint(self) -> AnomalyError:
        """The error of a run that has nothing to go back to."""
        why = shorten_ids(self.request.reason or str(self.request))
        return AnomalyError(
            f"step {self.bad_step} is to be undone ({why}), and there is no verified "
            f"checkpoint of step {self.last_good_step} or before to go back to; save more often with "
            f"checkpoint.save_interval, or leave such steps out with train.on_nonfinite=skip."
        )


def roll_back(job: Job, request: Request) -> None:
    """Undo a bad step: load the newest verified checkpoint before it; the data goes on after the bad step. Collective.

    Raises:
        AnomalyError: where there is no such checkpoint, or after more than `anomaly.max_rollbacks`.
    """
    run, checkpoints, progress = job.run, job.run.checkpoints, job.run.train_state
    bad_step = request.details.get("bad_step", progress.step)
    progress.num_rollbacks += 1
    run.features.before_rollback(bad_step, request)
    rollback = RollBack.at(progress, bad_step, request, run.cfg.anomaly.rollback_lr_factor)
    info = None
    if checkpoints is not None:
        checkpoints.finish()
        info = checkpoints.manager.newest(rollback.last_good_step)
    if checkpoints is None or info is None:
        raise rollback.without_checkpoint()
    checkpoints.restore(info, job.trained)
    rollback.carry_over(progress)
    write_decision(run, rollback.record(progress.step))
    run.features.rolled_back()
    leave_out_skipped(job)
    apply_overrides(job)
    run.saving.is_unsaved = True
    record = {"rolled_back_from": bad_step, "anomaly": request.reason or str(request)}
    publish(run, {"epoch": run.trainer_state.epoch, **record}, job.tell)
    restart_interval(job)


def restart_interval(job: Job) -> None:
    """Start the time of the logging interval, and of everything that is measured over it."""
    timer = job.run.timers(INTERVAL_TIME)
    job.run.sums.interval_start = job.run.clock.elapsed()
    job.run.features.restart_interval()
    timer.restart()
