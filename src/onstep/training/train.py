"""The training loop. Both doors hand everything to `train()`; there is no other loop."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from onstep.data import IteratorReader, StepBatches
from onstep.errors import DataError
from onstep.events import CallbackManager
from onstep.schedules import is_due
from onstep.training.anomalies import AnomalyWatch
from onstep.training.best_metric import note_best_metric
from onstep.training.decisions import agree
from onstep.training.evaluation import evaluate_and_print_results
from onstep.training.forward_step import prepare_forward_step_func
from onstep.training.interval import IntervalMeter
from onstep.training.log_step import RunStart, advance_tokens, final_metrics, log_step, publish
from onstep.training.scope import RunScope
from onstep.training.state import GlobalState
from onstep.training.step import samples_of, train_step
from onstep.training.telling import Teller

logger = logging.getLogger(__name__)

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


def train(
    forward_step_func: Callable[..., Any],
    model: list[nn.Module],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    global_state: GlobalState,
    checkpointing_context: Any = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    *,
    pg_collection: Any = None,
    callback_manager: CallbackManager | None = None,
    evaluation: Evaluation | None = None,
) -> None:
    """Train until the configured number of steps, or until somebody asks for a stop. Collective.

    Args:
        forward_step_func: one of the documented signatures (`onstep.training.forward_step`).
        model: list of model chunks, wrapped for data parallelism where there are several ranks.
        optimizer: a `TrainingOptimizer`, or an object whose `step()` returns `(successful, grad_norm, num_zeros)`.
        scheduler: an object with `step(increment)`.
        train_data_iterator: a loader of `onstep.data`, or an iterator of micro-batches, which is one endless epoch.
        valid_data_iterator: an `EvalLoader` or iterator for evaluations inside the loop; None evaluates nothing.
        global_state: state of the run.
        evaluation: what an evaluation does, where one validation set is not all of it.

    Raises:
        NonFiniteError: when a loss or gradient norm is NaN or infinite; the update was not applied.
    """
    tell = Teller(callback_manager, global_state, model, optimizer, scheduler)
    loop = Loop(
        forward_step_func=prepare_forward_step_func(forward_step_func, global_state),
        raw_forward_step_func=forward_step_func,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        reader=train_data_iterator if hasattr(train_data_iterator, "read") else IteratorReader(train_data_iterator),
        valid_data_iterator=valid_data_iterator,
        state=global_state,
        tell=tell,
        meter=IntervalMeter(),
        watch=AnomalyWatch(global_state, optimizer),
        start=RunStart.now(global_state),
        evaluation=evaluation,
    )
    with RunScope(tell) as scope, manual_gc(global_state):
        for chunk in model:
            chunk.train()
        global_state.control.clear_stops()
        global_state.stopped_by, global_state.was_stopped = None, False
        scope.begin_training()
        if global_state.cfg.validation.eval_on_start:
            run_evaluation(loop)
        while not is_finished(global_state):
            train_epoch(loop)
        conclude(loop)
        scope.end_training()


def train_epoch(loop: Loop) -> None:
    """One pass over the data, or what is left of it; ends early when a stop is decided."""
    state, control, tell, on = loop.state, loop.state.control, loop.tell, loop.tell.on
    control.honoured("should_epoch_stop")
    tell("on_epoch_start")
    has_data = True
    while has_data and not is_finished(state) and not control.should_epoch_stop:
        has_data = has_next_step(loop)
        if not has_data:
            break
        if on.on_step_begin:
            tell("on_step_begin")
        batches = loop.reader.read(state.num_microbatches)
        if batches is None:
            has_data = False
        else:
            run_step(loop, batches)
    if not has_data or control.should_epoch_stop or not has_next_step(loop):
        end_epoch(loop)
    tell("on_epoch_end")
    if control.should_abort_without_save:
        return
    fill_what_is_due_after_an_epoch(state)
    act_on_decisions(loop)


def has_next_step(loop: Loop) -> bool:
    """Whether the epoch has another step; data without a length tells only when it is read."""
    has_next = getattr(loop.reader, "has_next", None)
    return has_next is None or bool(has_next(loop.state.num_microbatches))


def end_epoch(loop: Loop) -> None:
    """Move to the start of the next epoch.

    Raises:
        DataError: when the data had not a single step in it.
    """
    progress = loop.state.train_state
    if progress.steps_in_epoch == 0:
        if progress.step == 0:
            raise DataError("The training data ended before its first step; it must yield at least one global batch.")
        logger.warning("the training data is exhausted at step %d; training ends", progress.step)
        loop.state.data_exhausted = True
        return
    progress.epoch += 1
    progress.samples_in_epoch = progress.steps_in_epoch = 0
    if not isinstance(loop.reader, IteratorReader):
        loop.reader.seek(progress.epoch, 0)


def run_step(loop: Loop, batches: StepBatches) -> None:
    """One optimizer step and everything that follows from it."""
    state, tell, on = loop.state, loop.tell, loop.tell.on
    if on.on_train_step_start:
        tell("on_train_step_start", micro_batches=batches.micro_batches, sample_ids=batches.sample_ids)
    loop.watch.begin_step()
    result = train_step(loop.forward_step_func, batches, loop.model, loop.optimizer, loop.scheduler, state, tell)
    if on.on_train_step_end:
        tell(
            "on_train_step_end",
            loss_dict=result.loss_dict,
            grad_norm=result.grad_norm,
            skipped_iter=bool(result.skipped_iter),
            sample_ids=batches.sample_ids,
        )
    loop.watch.end_step(batches.sample_ids, state.last_micros)
    loop.meter.add(state.last_step_loss, result.grad_norm, not result.skipped_iter)
    advance(state, batches)
    if loop.start.is_first and not is_finished(state):
        loop.start.after_first_step(state.last_step_loss.tokens)
    fill_what_is_due(state)
    if on.on_step_end:
        tell("on_step_end")
    act_on_decisions(loop)
    collect_garbage(state)


def advance(state: GlobalState, batches: StepBatches) -> None:
    """Count the step that just ran; skipped updates count as steps."""
    progress, samples = state.train_state, samples_of(batches, state)
    progress.step += 1
    progress.steps_in_epoch += 1
    progress.samples_in_epoch += samples
    progress.consumed_train_samples += samples


def fill_what_is_due(state: GlobalState) -> None:
    """Put into the control what is due at this step, where callbacks may veto it."""
    logger_config, validation, step = state.cfg.logger, state.cfg.validation, state.train_state.step
    state.control.fill(
        log=is_due(step, logger_config.log_interval) or (step == 1 and logger_config.log_first_step),
        evaluate=is_due(step, validation.eval_interval, start=validation.start_eval_at_iter or 0),
        save=False,
    )


def fill_what_is_due_after_an_epoch(state: GlobalState) -> None:
    """Put into the control what is due when an epoch has ended."""
    validation = state.cfg.validation
    first_epoch = validation.start_eval_at_epoch or 0
    state.control.fill(
        log=state.cfg.logger.log_on_each_epoch,
        evaluate=validation.eval_each_epoch and state.trainer_state.epoch >= first_epoch,
        save=False,
    )


def act_on_decisions(loop: Loop) -> None:
    """Agree on what is due or asked for, and do it: log, evaluate, save, in this order. Collective."""
    state, control = loop.state, loop.state.control
    agree(state)
    if control.should_log:
        control.honoured("should_log")
        loop.watch.check(wait=True)
        log_step(state, loop.meter, loop.optimizer, loop.tell)
        agree(state)
    if control.should_evaluate:
        control.honoured("should_evaluate")
        loop.watch.check(wait=True)
        run_evaluation(loop)
        agree(state)
    if control.should_save:
        control.honoured("should_save")
        warn_that_nothing_is_saved(state)


def run_evaluation(loop: Loop) -> None:
    """Evaluate inside the loop, on the validation set or as the caller said."""
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
            tell=loop.tell,
        )
        note_best_metric(state, state.last_metrics)


def is_finished(state: GlobalState) -> bool:
    """Whether the run has its steps, or somebody asked for its end."""
    control, limit = state.control, state.cfg.train.train_iters
    if control.should_training_stop or control.should_abort_without_save or state.data_exhausted:
        return True
    return limit is not None and state.train_state.step >= limit


def conclude(loop: Loop) -> None:
    """Say why training ended and log the final metrics; an aborted run logs nothing more."""
    state = loop.state
    loop.watch.check(wait=True)
    if state.world.is_main:
        why = f"stopped: {state.stopped_by}" if state.stopped_by else "all steps done"
        level = logging.WARNING if state.control.should_abort_without_save else logging.INFO
        logger.log(level, "training ended at step %d: %s", state.train_state.step, why)
    if state.control.should_abort_without_save:
        return
    rest = loop.meter.flush()
    if rest is not None:
        advance_tokens(state, rest)
        state.last_interval = rest
    publish(state, final_metrics(state, loop.start), loop.tell)


def warn_that_nothing_is_saved(state: GlobalState) -> None:
    """Tell once that a requested checkpoint is not written."""
    if state.world.is_main and not state.warned_of_saving:
        state.warned_of_saving = True
        logger.warning("a save was asked for at step %d, but this run writes no checkpoints", state.train_state.step)


class manual_gc:  # noqa: N801 - reads as a statement in `with`
    """Switch automatic garbage collection off for the run, where `train.manual_gc` says so, and on again after it."""

    def __init__(self, state: GlobalState) -> None:
        self._manual = state.cfg.train.manual_gc
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> None:
        if self._manual:
            gc.disable()
            gc.collect()

    def __exit__(self, *exception: object) -> None:
        if self._manual and self._was_enabled:
            gc.enable()


def collect_garbage(state: GlobalState) -> None:
    """Collect at the configured interval, where garbage collection is manual."""
    config = state.cfg.train
    if config.manual_gc and config.manual_gc_interval and state.train_state.step % config.manual_gc_interval == 0:
        gc.collect()
