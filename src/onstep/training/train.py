"""The training loop. Both doors hand everything to `train()`; there is no other loop."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from onstep.data import IteratorReader, StepBatches
from onstep.errors import DataError
from onstep.events import CallbackManager
from onstep.optim import TorchSchedulerAdapter, wrap_optimizer
from onstep.schedules import is_due
from onstep.training.anomalies import AnomalyWatch
from onstep.training.best_metric import note_best_metric
from onstep.training.certificate import certified
from onstep.training.data_wait import DataTimeout, wait_for_data
from onstep.training.decisions import agree
from onstep.training.evaluation import evaluate_and_print_results
from onstep.training.exits import (
    EvaluationInterrupted,
    checkpoint_and_decide_exit,
    handled_signals,
    random_state_before,
    restore_random_state,
    save_checkpoint_and_time,
)
from onstep.training.forward_step import prepare_forward_step_func
from onstep.training.interval import IntervalMeter
from onstep.training.log_step import RunStart, advance_tokens, final_metrics, log_step, publish
from onstep.training.scope import RunScope
from onstep.training.progress_log import log_job_start
from onstep.training.signals import Preempted
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
        optimizer: a `TrainingOptimizer`, a torch optimizer (it is made one, with `optimizer.clip_grad`), or an object
            whose `step()` returns `(successful, grad_norm, num_zeros)` and which clips by itself. Of the last kind loss
            and gradients are read once before each `step()`: nothing that is not finite is handed to it.
        scheduler: an object with `step(increment in samples)`, a torch scheduler, or None for a constant rate.
        train_data_iterator: a loader of `onstep.data`, or an iterator of micro-batches, which is one endless epoch.
        valid_data_iterator: an `EvalLoader` or iterator for evaluations inside the loop; None evaluates nothing.
        global_state: state of the run.
        evaluation: what an evaluation does, where one validation set is not all of it.

    Raises:
        NonFiniteError: when a loss or gradient norm is NaN or infinite; the update was not applied.
    """
    optimizer = wrap_optimizer(optimizer, global_state.cfg.optimizer.clip_grad)
    if isinstance(scheduler, LRScheduler):
        scheduler = TorchSchedulerAdapter(scheduler)
    tell = Teller(callback_manager, global_state, model, optimizer, scheduler)
    loop = Loop(
        forward_step_func=prepare_forward_step_func(forward_step_func, global_state),
        raw_forward_step_func=forward_step_func,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        reader=as_reader(train_data_iterator, global_state),
        valid_data_iterator=valid_data_iterator,
        state=global_state,
        tell=tell,
        meter=IntervalMeter(),
        watch=AnomalyWatch(global_state, optimizer),
        start=RunStart.now(global_state),
        evaluation=evaluation,
    )
    with RunScope(tell) as scope, manual_gc(global_state), handled_signals(global_state), certified(global_state):
        for chunk in model:
            chunk.train()
        prepare_state(loop)
        scope.begin_training()
        go_to_position(loop)
        if not is_finished(global_state):
            global_state.was_concluded = False
            start_or_pick_up(loop)
        global_state.interval_start = time.perf_counter()
        while not is_finished(global_state):
            train_epoch(loop)
        conclude(loop)
        scope.end_training()
    leave_if_preempted(global_state)


def as_reader(data: Any, state: GlobalState) -> Any:
    """What the loop reads steps from: a loader as it is, or a raw iterator of micro-batches in a reader."""
    if hasattr(data, "read"):
        return data
    return IteratorReader(data[0] if isinstance(data, list) else data, world_size=state.world.size)


def prepare_state(loop: Loop) -> None:
    """Forget what an earlier `train()` on this state left (its stop, its mean loss); keep what a checkpoint brought."""
    state = loop.state
    if not state.is_resumed:
        state.control.clear_stops()
        state.stopped_by = None
        state.loss_sum, state.loss_steps = 0.0, 0
        state.was_concluded = state.epoch_is_open = False
    state.was_stopped, state.data_exhausted, state.last_interval = False, False, None
    state.has_stepped = state.saves_at_end = False
    state.facts.max_steps = state.train_iters or 0
    state.flops_at_start = state.train_state.floating_point_operations_so_far
    state.exits.start(state)
    state.loop_parts["meter"] = loop.meter
    if state.checkpoints is not None:
        state.checkpoints.check_states(loop.optimizer, loop.scheduler)
        if state.cfg.logger.log_progress:
            log_job_start(state)


def go_to_position(loop: Loop) -> None:
    """Move data, log interval and random generators to where the checkpoint was taken. Collective."""
    state = loop.state
    if state.checkpoints is not None and state.is_resumed:
        state.checkpoints.load_position(loop.reader, loop.scheduler)
    agree(state)


def start_or_pick_up(loop: Loop) -> None:
    """Evaluate before the first step where that is wanted, or do what was still pending at the checkpoint."""
    state = loop.state
    if state.is_resumed:
        act_on_decisions(loop)
        if is_finished(state) and state.epoch_is_open and state.exits.decided is None:
            end_epoch(loop)
    elif state.cfg.validation.eval_on_start:
        run_evaluation(loop)
        agree(state)


def train_epoch(loop: Loop) -> None:
    """One pass over the data, or what is left of it; ends early when a stop is decided."""
    state, control, tell = loop.state, loop.state.control, loop.tell
    if not state.epoch_is_open:
        control.honoured("should_epoch_stop")
    state.epoch_is_open = True
    tell("on_epoch_start")
    agree(state)
    has_data = True
    while has_data and not is_finished(state) and not control.should_epoch_stop:
        has_data = has_next_step(loop) and read_and_run(loop)
    if state.exits.decided is None:
        end_epoch(loop, has_data)


def read_and_run(loop: Loop) -> bool:
    """Read the next step's micro-batches and run it; False at the end of the data."""
    state, tell = loop.state, loop.tell
    if tell.on.on_step_begin:
        tell("on_step_begin")
    try:
        batches = wait_for_data(
            lambda: loop.reader.read(state.num_microbatches), state.exits.handler, state.cfg.train.data_timeout
        )
    except DataTimeout as timeout:
        logger.warning("%s", timeout)
        give_up_on_data(loop)
        return True
    if batches is None:
        return False
    run_step(loop, batches)
    return True


def end_epoch(loop: Loop, has_data: bool = True) -> None:
    """Move to the next epoch if this one is over, tell its end, and do what is due there."""
    state = loop.state
    if not has_data or not has_next_step(loop):
        check_that_there_was_data(loop)
        start_next_epoch(loop)
    elif state.control.should_epoch_stop:
        start_next_epoch(loop)
    state.epoch_is_open = False
    fill_what_is_due_after_an_epoch(state)
    loop.tell("on_epoch_end")
    state.is_unsaved = True
    act_on_decisions(loop)


def has_next_step(loop: Loop) -> bool:
    """Whether the epoch has another step; data without a length tells only when it is read."""
    has_next = getattr(loop.reader, "has_next", None)
    return has_next is None or bool(has_next(loop.state.num_microbatches))


def check_that_there_was_data(loop: Loop) -> None:
    """Notice data that ends for good: a raw iterator has one epoch, and an epoch without a step has no next one.

    Raises:
        DataError: when the data had not a single step in it.
    """
    state = loop.state
    progress = state.train_state
    if progress.step == 0:
        raise DataError("The training data ended before its first step; it must yield at least one global batch.")
    state.data_exhausted = isinstance(loop.reader, IteratorReader) or progress.steps_in_epoch == 0
    if state.data_exhausted and state.world.is_main:
        logger.warning("the training data is exhausted at step %d; training ends", progress.step)


def start_next_epoch(loop: Loop) -> None:
    """Move to the start of the next epoch; a raw iterator has none and goes on where it stands."""
    if isinstance(loop.reader, IteratorReader):
        return
    progress = loop.state.train_state
    progress.epoch += 1
    progress.samples_in_epoch = progress.steps_in_epoch = 0
    loop.reader.seek(progress.epoch, 0)


def run_step(loop: Loop, batches: StepBatches) -> None:
    """One optimizer step and everything that follows from it."""
    state, tell, on = loop.state, loop.tell, loop.tell.on
    if on.on_train_step_start:
        tell("on_train_step_start", micro_batches=batches.micro_batches, sample_ids=batches.sample_ids)
    loop.watch.begin_step()
    result = train_step(loop.forward_step_func, batches, loop.model, loop.optimizer, loop.scheduler, state, tell)
    if loop.start.is_first:
        say_weighting(state)
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
    if state.certificate is not None:
        step, loss = state.train_state.step, state.last_step_loss.value()
        state.certificate.extend(step, batches.sample_ids, loop.optimizer, loss, loop.model)
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
    state.has_stepped = state.is_unsaved = True


def fill_what_is_due(state: GlobalState) -> None:
    """Put into the control what is due at this step, where callbacks may veto it."""
    logger_config, validation, step = state.cfg.logger, state.cfg.validation, state.train_state.step
    first_evaluated = validation.start_eval_at_iter or 0
    is_last_evaluated = state.evaluates_last_step and has_all_steps(state) and step >= first_evaluated
    state.control.fill(
        log=is_due(step, logger_config.log_interval) or (step == 1 and logger_config.log_first_step),
        evaluate=is_due(step, validation.eval_interval, start=first_evaluated) or is_last_evaluated,
        save=is_due(step, state.cfg.checkpoint.save_interval),
    )


def fill_what_is_due_after_an_epoch(state: GlobalState) -> None:
    """Put into the control what is due when an epoch has ended, where callbacks may veto it."""
    validation = state.cfg.validation
    first_epoch = validation.start_eval_at_epoch or 0
    state.control.fill(
        log=state.cfg.logger.log_on_each_epoch,
        evaluate=validation.eval_each_epoch and state.trainer_state.epoch >= first_epoch,
        save=state.cfg.checkpoint.save_each_epoch,
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
    if control.should_log:
        control.honoured("should_log")
        loop.watch.check(wait=True)
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
    """Save what is due, and let `state.exits` say whether the process leaves. Collective."""
    state, progress = loop.state, loop.state.train_state
    checkpoint = state.cfg.checkpoint
    if state.control.should_save or state.exits.decided is not None:
        loop.watch.check(wait=True)
    state.saves_at_end = checkpoint.save_at_end and is_finished(state) and state.exits.decided is None
    checkpoint_and_decide_exit(
        state,
        loop.model,
        loop.optimizer,
        loop.scheduler,
        progress.floating_point_operations_so_far,
        None,
        loop.reader,
    )


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
    state, started = loop.state, time.perf_counter()
    state.evaluation_is_whole = True
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
    state.evaluated_at = state.train_state.step
    state.interval_start += time.perf_counter() - started


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


def conclude(loop: Loop) -> None:
    """Say why training ended, log the final metrics and save; an aborted run logs and saves nothing more."""
    state, control = loop.state, loop.state.control
    loop.watch.check(wait=True)
    leaves = state.exits.decided is not None
    state.was_stopped = leaves or is_stopped(state)
    if not state.was_stopped:
        state.stopped_by = None
    if state.world.is_main:
        why = f"stopped: {state.stopped_by}" if state.was_stopped else "all steps done"
        why = "no more data" if state.data_exhausted else why
        level = logging.WARNING if control.should_abort_without_save else logging.INFO
        if not leaves:
            logger.log(level, "training ended at step %d: %s", state.train_state.step, why)
    if not control.should_abort_without_save and not leaves:
        publish_final_metrics(loop)
        save_at_end(loop)
    if state.checkpoints is not None:
        state.checkpoints.finish()


def is_stopped(state: GlobalState) -> bool:
    """Whether a callback ends the run before its time."""
    control = state.control
    return control.should_abort_without_save or (control.should_training_stop and not has_all_steps(state))


def publish_final_metrics(loop: Loop) -> None:
    """Log what the training did, once: a run that ended, was killed and is started again has logged it."""
    state = loop.state
    if state.was_concluded:
        return
    rest = loop.meter.flush()
    if rest is not None:
        advance_tokens(state, rest)
        state.last_interval = rest
    publish(state, final_metrics(state, loop.start), loop.tell)
    state.was_concluded = state.is_unsaved = True


def save_at_end(loop: Loop) -> None:
    """Save the state that the training ended with, so that it can be extended."""
    state = loop.state
    if state.checkpoints is None or not state.cfg.checkpoint.save_at_end or not state.is_unsaved:
        return
    flops = state.train_state.floating_point_operations_so_far
    save_checkpoint_and_time(
        state, loop.model, loop.optimizer, loop.scheduler, flops, None, train_data_iterator=loop.reader
    )


def give_up_on_data(loop: Loop) -> None:
    """The data does not come and a signal says to leave: save without the batch that is missing.

    Raises:
        Preempted: where there are other ranks. They may be in the middle of the step, so nothing can be agreed on; the
            newest checkpoint stands.
    """
    state = loop.state
    if state.world.size > 1:
        raise Preempted(
            f"rank {state.world.rank} waited {state.cfg.train.data_timeout} s for data after a signal; the run leaves "
            f"without a save and continues from its newest checkpoint."
        )
    state.exits.decided = "signal"
    save_and_decide_exit(loop)


def leave_if_preempted(state: GlobalState) -> None:
    """End the process where a signal asked for it, with the exit code that says: start me again.

    Raises:
        Preempted: a SystemExit with code 75.
    """
    if state.exits.decided == "signal":
        raise Preempted(f"preempted at step {state.train_state.step}; the same command continues the run")


def say_weighting(state: GlobalState) -> None:
    """Say once how mean losses are weighted, which only the first micro-batch tells; `Trainer` says it itself."""
    micro = state.last_micros[0]
    if micro.kind != "mean" or state.trainer is not None or not state.world.is_main:
        return
    unit = state.cfg.train.loss_weighting
    if unit == "auto":
        unit = "samples" if micro.tokens is None else "tokens"
    logger.info("loss: means of micro-batches, weighted by their %s (train.loss_weighting)", unit)


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
