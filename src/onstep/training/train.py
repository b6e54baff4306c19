"""The training loop. Both doors hand everything to `train()`; there is no other loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from onstep.data import IteratorReader, StepBatches
from onstep.events import CallbackManager
from onstep.optim import TorchSchedulerAdapter, TrainingOptimizer, wrap_optimizer
from onstep.pulse import PULSE
from onstep.training.actions import (
    act_on_decisions,
    fill_what_is_due,
    fill_what_is_due_after_an_epoch,
    run_evaluation,
)
from onstep.training.anomalies import AnomalyWatch
from onstep.training.certificate import certified
from onstep.training.checkpointing import own_checkpoints
from onstep.training.conclusion import conclude, leave_for_rerun, leave_if_preempted
from onstep.training.decisions import agree
from onstep.training.exits import handled_signals
from onstep.training.expert_steps import EXPERTS, experts_of
from onstep.training.fault_tolerance import on_training_step_end, on_training_step_start
from onstep.training.forward_step import prepare_forward_step_func
from onstep.training.garbage import manual_gc
from onstep.training.growth import take_up_size
from onstep.training.housekeeping import housekeeping_for
from onstep.training.interval import IntervalMeter
from onstep.training.interval_time import measured_steps
from onstep.training.log_step import RunStart
from onstep.training.loop import Evaluation, Loop, begin_reports, is_finished
from onstep.training.param_sync import hooks_of
from onstep.training.positions import (
    check_that_there_was_data,
    go_to_position,
    has_next_step,
    prepare_state,
    start_next_epoch,
)
from onstep.training.profiling import check_profilers
from onstep.training.reading import advance, is_passed_over, note_decrease, pass_over, read_or_leave
from onstep.training.scope import RunScope
from onstep.training.state import GlobalState
from onstep.training.step import samples_of, train_step
from onstep.training.step_reporter import REPORTER, reporter_for
from onstep.training.telling import Teller
from onstep.training.trackers import TRACKERS, closing_trackers
from onstep.training.watchdog import watched

logger = logging.getLogger(__name__)


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
        checkpointing_context: kept for Megatron Bridge; checkpoints are the state's.
        process_non_loss_data_func: handed to the evaluations inside the loop, as is
        non_loss_data_func: see `evaluate_and_print_results`.
        pg_collection: kept for Megatron Bridge.
        callback_manager: who is told.
        evaluation: what an evaluation does, where one validation set is not all of it.

    Raises:
        NonFiniteError: when a loss or gradient norm is NaN or infinite; the update was not applied.
        ReplicaMismatchError: when replicas differ (`train.check_weight_hash_across_dp_replicas_interval`).
        ConfigError: where `profiling.use_pytorch_profiler` and a callback both profile.
    """
    check_profilers(global_state.cfg.profiling, callback_manager)
    options = global_state.cfg.optimizer
    optimizer = wrap_optimizer(
        optimizer,
        options.clip_grad,
        grad_norm_skip_threshold=options.grad_norm_skip_threshold,
        log_num_zeros_in_grad=options.log_num_zeros_in_grad,
    )
    scaler = global_state.loss_scaler(optimizer)
    if scaler is not None and not isinstance(optimizer, TrainingOptimizer):
        global_state.loop_parts["scaler"] = scaler
    if isinstance(scheduler, LRScheduler):
        scheduler = TorchSchedulerAdapter(scheduler)
    tell = Teller(callback_manager, global_state, model, optimizer, scheduler)
    with own_checkpoints(global_state, tell, model, optimizer, scheduler):
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
            reporter=reporter_for(global_state, model, optimizer),
            housekeeping=housekeeping_for(global_state, model),
            process_non_loss_data_func=process_non_loss_data_func,
            non_loss_data_func=non_loss_data_func,
        )
        with (
            handled_signals(global_state),
            watched(global_state),
            closing_trackers(global_state),
            RunScope(tell) as scope,
            manual_gc(global_state),
            certified(global_state),
            measured_steps(global_state),
            kept_house(loop),
        ):
            for chunk in model:
                chunk.train()
            prepare_state(loop)
            save_with_checkpoints(loop)
            scope.begin_training()
            go_to_position(loop)
            begin_housekeeping(loop)
            progress = global_state.train_state
            global_state.trackers.agree_on_run()
            global_state.trackers.open(progress.step, progress.consumed_train_samples)
            PULSE.beats += 1  # before the limit begins: what the set-up took does not count
            PULSE.doing, PULSE.phase = "beginning to train", "training"
            if global_state.watchdog is not None:
                global_state.watchdog.look_now()
            if not is_finished(global_state):
                global_state.was_concluded = False
                start_or_pick_up(loop)
            begin_reports(loop)
            while not is_finished(global_state):
                train_epoch(loop)
            conclude(loop)
            if global_state.forward_pre_hooks is not None:
                global_state.forward_pre_hooks.end()
            scope.end_training()
    leave_if_preempted(global_state)


@contextmanager
def kept_house(loop: Loop) -> Iterator[None]:
    """End the profiles, and leave the chunks' hooks and their schedule, when the block ends, however that happens."""
    try:
        yield
    finally:
        hooks, loop.state.forward_pre_hooks = loop.state.forward_pre_hooks, None
        if hooks is not None:
            hooks.give_back_param_sync_func()
        if loop.housekeeping is not None:
            loop.housekeeping.close()


def begin_housekeeping(loop: Loop) -> None:
    """Compare weights, start profiles and switch hooks off before the first step. Collective."""
    state = loop.state
    state.forward_pre_hooks = hooks_of(loop.model, loop.optimizer)
    if state.forward_pre_hooks is not None:
        state.forward_pre_hooks.begin(state.train_state.step)
    if loop.housekeeping is not None:
        loop.housekeeping.begin()
    if state.nvrx_straggler_manager is not None:
        loop.train_step = state.nvrx_straggler_manager.wrap_train_step_function(train_step)


def save_with_checkpoints(loop: Loop) -> None:
    """Name what the reports remember among the parts that checkpoints hold."""
    state = loop.state
    state.loop_parts.pop(REPORTER, None)
    if loop.reporter is not None:
        state.loop_parts[REPORTER] = loop.reporter
    if state.trackers.configured:
        state.rank_parts[TRACKERS] = state.trackers
    experts = experts_of(state, loop.model)
    if experts is not None:
        state.loop_parts[EXPERTS] = experts


def as_reader(data: Any, state: GlobalState) -> Any:
    """What the loop reads steps from: a loader as it is, or a raw iterator of micro-batches in a reader."""
    if hasattr(data, "read"):
        return data
    return IteratorReader(data[0] if isinstance(data, list) else data, world_size=state.world.size)


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
    """Read the next step's micro-batches and run it, or pass over it; False at the end of the data."""
    state, tell = loop.state, loop.tell
    if loop.housekeeping is not None:
        loop.housekeeping.before_step()
    if is_passed_over(state):
        return pass_over(loop)
    with state.nvtx(f"training_step_{state.train_state.step}" if state.nvtx.enabled else ""):
        if tell.on.on_step_begin:
            tell("on_step_begin")
        if state.rerun_state_machine.is_enabled:
            loop.position_before = loop.reader.state_dict()
        batches, leaves = read_or_leave(loop)
        if batches is not None:
            run_step(loop, batches)
    return batches is not None or leaves


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


def run_step(loop: Loop, batches: StepBatches) -> None:
    """One optimizer step and everything that follows from it."""
    state, tell, on = loop.state, loop.tell, loop.tell.on
    on_training_step_start(state)
    if on.on_train_step_start:
        tell("on_train_step_start", micro_batches=batches.micro_batches, sample_ids=batches.sample_ids)
    loop.watch.begin_step()
    PULSE.doing = "computing a step"
    result = loop.train_step(loop.forward_step_func, batches, loop.model, loop.optimizer, loop.scheduler, state, tell)
    on_training_step_end(state)
    if result.should_exit:
        leave_for_rerun(loop, result)
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
    PULSE.doing = "finishing a step"
    loop.watch.end_step(batches.sample_ids, state.last_micros)
    loop.meter.add(
        None if loop.watch.left_out else state.last_step_loss,
        result.grad_norm,
        successful=not result.skipped_iter,
        num_zeros=result.num_zeros_in_grad,
    )
    if state.forward_pre_hooks is not None:
        state.forward_pre_hooks.after_update(not result.skipped_iter)
    advance(state, samples_of(batches, state))
    state.has_stepped = True
    if state.cfg.train.decrease_batch_size_if_needed:
        note_decrease(state)
    if loop.reporter is not None:
        loop.reporter.take_up(result)
    loop.watch.conclude_step()
    if state.certificate is not None:
        step, loss = state.train_state.step, state.last_step_loss.value()
        state.certificate.extend(step, batches.sample_ids, loop.optimizer, loss, loop.model)
    if loop.start.is_first and not is_finished(state):
        loop.start.after_first_step(state.last_step_loss.tokens)
    fill_what_is_due(state)
    if on.on_step_end:
        tell("on_step_end")
    act_on_decisions(loop)
    if loop.housekeeping is not None:
        loop.housekeeping.after_step(batches)
    take_up_size(loop)


def say_weighting(state: GlobalState) -> None:
    """Say once how mean losses are weighted, which only the first micro-batch tells; `Trainer` says it itself."""
    micro = state.last_micros[0]
    if micro.kind != "mean" or state.trainer is not None or not state.world.is_main:
        return
    unit = state.cfg.train.loss_weighting
    if unit == "auto":
        unit = "samples" if micro.tokens is None else "tokens"
    logger.info("loss: means of micro-batches, weighted by their %s (train.loss_weighting)", unit)
