"""What is due or asked for at the end of a step or an epoch, and doing it: log, evaluate, go back, save, leave."""

from __future__ import annotations

from onstep.schedules import is_due
from onstep.training.best_metric import note_best_metric
from onstep.training.decisions import agree, setting
from onstep.training.evaluation import evaluate_and_print_results
from onstep.training.exits import (
    EvaluationInterrupted,
    checkpoint_and_decide_exit,
    random_state_before,
    restore_random_state,
)
from onstep.training.garbage import garbage_collected
from onstep.training.interval_time import outside_interval
from onstep.training.log_step import log_step, publish
from onstep.training.loop import Loop, begin_reports, has_all_steps, is_finished
from onstep.training.param_sync import hooks_off
from onstep.training.positions import apply_overrides, leave_out_skipped
from onstep.training.rollback import RollBack
from onstep.training.state import GlobalState


def fill_what_is_due(state: GlobalState) -> None:
    """Put into the control what is due at this step, where callbacks may veto it."""
    validation, step = state.cfg.validation, state.train_state.step
    first_evaluated = validation.start_eval_at_iter or 0
    is_last_evaluated = state.evaluates_last_step and has_all_steps(state) and step >= first_evaluated
    is_evaluated = is_due(step, setting(state, "eval_interval"), start=first_evaluated) or is_last_evaluated
    is_saved = state.checkpoints is not None and is_due(step, setting(state, "save_interval"))
    state.control.fill(
        log=is_due(step, setting(state, "log_interval")) or (step == 1 and state.cfg.logger.log_first_step),
        evaluate=is_evaluated or (is_saved and validation.eval_on_save),
        save=is_saved,
    )


def fill_what_is_due_after_an_epoch(state: GlobalState) -> None:
    """Put into the control what is due when an epoch has ended, where callbacks may veto it."""
    validation = state.cfg.validation
    first_epoch = validation.start_eval_at_epoch or 0
    is_saved = state.checkpoints is not None and state.cfg.checkpoint.save_each_epoch
    is_evaluated = validation.eval_each_epoch and state.trainer_state.epoch >= first_epoch
    state.control.fill(
        log=state.cfg.logger.log_on_each_epoch,
        evaluate=is_evaluated or (is_saved and validation.eval_on_save),
        save=is_saved,
    )


def act_on_decisions(loop: Loop) -> None:
    """Agree on what is due or asked for, and do it: log, evaluate, save, leave, in this order. Collective.

    An aborted run does none of it. A process that leaves does not begin an evaluation: that is still pending in its
    checkpoint.
    """
    state, control = loop.state, loop.state.control
    agree(state)
    if state.checkpoints is not None:
        state.checkpoints.finalize_if_written()
    if control.should_abort_without_save:
        return
    apply_overrides(loop)
    rollback = loop.watch.rollback()
    if rollback is not None:
        roll_back(loop, rollback)
        return
    if loop.reporter is not None and not control.should_log:
        loop.reporter.report(is_logged=False)
    if control.should_log:
        control.honoured("should_log")
        loop.watch.check(wait=True)
        if loop.reporter is not None:
            loop.reporter.report(is_logged=True)
        log_step(state, loop.meter, loop.optimizer, loop.tell)
        state.is_unsaved = True
        agree(state)
    if control.should_evaluate and state.exits.decided is None:
        control.honoured("should_evaluate")
        loop.watch.check(wait=True)
        evaluate_unless_interrupted(loop)
        state.is_unsaved = True
        agree(state)
    save_and_decide_exit(loop)


def save_and_decide_exit(loop: Loop) -> None:
    """Save what is due, and let `state.exits` say whether the process leaves. Collective.

    What came while a save ran is agreed on right after it, so that a signal then makes no second checkpoint.
    """
    state = loop.state
    was_unsaved, is_due_now = state.is_unsaved, state.control.should_save
    if is_due_now or state.exits.decided is not None:
        loop.watch.check(wait=True)
    if state.ended_by_anomaly:  # the counters may be ahead of the weights
        state.control.honoured("should_save")
        return
    state.saves_at_end = state.cfg.checkpoint.save_at_end and is_finished(state) and state.exits.decided is None
    _save_and_decide_exit(loop)
    has_saved = (is_due_now and not state.saves_at_end) or (was_unsaved and not state.is_unsaved)
    if has_saved and state.exits.decided is None:
        agree(state)
        if state.exits.decided is not None:
            _save_and_decide_exit(loop)


def _save_and_decide_exit(loop: Loop) -> None:
    state = loop.state
    flops = state.train_state.floating_point_operations_so_far
    checkpoint_and_decide_exit(state, loop.model, loop.optimizer, loop.scheduler, flops, None, loop.reader)


def evaluate_unless_interrupted(loop: Loop) -> None:
    """Evaluate; where a signal ends it, put everything back to before it, so that the resumed run evaluates again."""
    state = loop.state
    random_state = random_state_before(state)
    try:
        run_evaluation(loop)
    except EvaluationInterrupted:
        state.control.fill(log=False, evaluate=True, save=False)
        restore_random_state(state, random_state)


def run_evaluation(loop: Loop) -> None:
    """Evaluate inside the loop, on the validation set or as the caller said; no time of the logging interval."""
    state = loop.state
    state.evaluation_is_whole = True
    timer = state.timers("eval-time")
    with outside_interval(state), hooks_off(state), garbage_collected(state), timer.measure(barrier=True):
        evaluate_in_loop(loop)
    state.evaluated_at = state.train_state.step


def evaluate_in_loop(loop: Loop) -> None:
    """Evaluate as the caller of `train()` said, or on the validation set."""
    state = loop.state
    if loop.evaluation is not None:
        loop.evaluation()
    elif loop.valid_data_iterator is not None:
        evaluate_and_print_results(
            state,
            f"iteration {state.train_state.step}",
            loop.raw_forward_step_func,
            loop.valid_data_iterator,
            loop.model,
            state.cfg.model,
            process_non_loss_data_func=loop.process_non_loss_data_func,
            non_loss_data_func=loop.non_loss_data_func,
            tell=loop.tell,
        )
        note_best_metric(state, state.last_metrics)


def roll_back(loop: Loop, rollback: RollBack) -> None:
    """Undo a bad step: load the newest verified checkpoint before it; the data goes on after the bad step. Collective.

    Raises:
        AnomalyError: where there is no such checkpoint.
    """
    state, checkpoints = loop.state, loop.state.checkpoints
    info = None
    if checkpoints is not None:
        checkpoints.finish()
        info = checkpoints.manager.newest(rollback.last_good_step)
    if checkpoints is None or info is None:
        raise rollback.without_checkpoint()
    checkpoints.restore(info, loop.model, loop.optimizer, loop.scheduler)
    loop.watch.rolled_back(rollback)
    leave_out_skipped(loop)
    apply_overrides(loop)
    state.is_unsaved = True
    record = {"rolled_back_from": rollback.bad_step, "anomaly": rollback.request.reason or str(rollback.request)}
    publish(state, {"epoch": state.trainer_state.epoch, **record}, loop.tell)
    begin_reports(loop)
    state.trackers.reopen(state.train_state.step, state.train_state.consumed_train_samples)
