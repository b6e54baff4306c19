"""Decides on checkpoints and exits at the end of a step, in one place for all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

from torch import nn

from onstep.checkpoint import RngState
from onstep.errors import warn_once
from onstep.events import Request
from onstep.training.feature import is_due
from onstep.training.protocols import StateDict, Trained, UserOptimizer, UserScheduler
from onstep.training.run import Run
from onstep.training.runs.signals import Preempted
from onstep.training.stages.agreement import write_decision
from onstep.training.stages.progress_log import compute_throughputs_and_append_to_progress_log, pending_flops

logger = logging.getLogger(__name__)


class EvaluationInterrupted(Preempted):
    """A signal or time limit ended an evaluation; training saves the state from before it, other callers just exit."""


def checkpoint_and_decide_exit(
    state: Run,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    opt_param_scheduler: UserScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Mapping[str, object] | None,
    train_data_iterator: Any,
    saves_at_end: bool = False,
) -> bool:
    """Save what is due or requested, and decide whether the process exits now. Collective; it only reads decisions.

    A process that exits (signal, `train.exit_duration_in_mins`, a slow rank with `stop_if_detected`,
    `train.exit_interval`) saves first, once, if the run has checkpoints and anything has changed since the last one.

    Args:
        state: the run's state; its `checkpoints` do the writing.
        model: list of model chunks.
        optimizer: the optimizer that the loop drives.
        opt_param_scheduler: the learning-rate schedule, or None.
        num_floating_point_operations_so_far: of the whole run up to its last logged step; for the progress log.
        checkpointing_context: accepted for compatibility with Megatron Bridge, and ignored.
        train_data_iterator: its position is saved; None saves none.
        saves_at_end: training is at its end, where it saves anyway: a save that is due waits for that.

    Returns:
        True if training should end here; `state.exits.decided` says why.
    """
    step, exits = state.train_state.step, state.exits
    is_last = state.train_iters is not None and step >= state.train_iters
    if exits.decided in ("duration", "straggler") and is_last:
        exits.decided, exits.straggler = None, ""
    may_leave = exits.decided is None and not is_last and state.stage.has_stepped
    if may_leave and is_due(step, state.cfg.train.exit_interval):
        exits.decided = "interval"
    leaves = exits.decided is not None
    every = state.cfg.checkpoint.non_persistent_save_interval
    is_requested = state.control.should_save
    state.control.clear("should_save")
    persistent = (is_requested and not saves_at_end) or (leaves and state.is_unsaved)
    if persistent or (not is_requested and state.is_unsaved and is_due(step, every)):
        flops = num_floating_point_operations_so_far
        save_checkpoint_and_time(
            state,
            model,
            optimizer,
            opt_param_scheduler,
            flops,
            checkpointing_context,
            not persistent,
            train_data_iterator,
            _why_saved(state, is_requested) if persistent else f"every {every} steps, not persistent",
        )
    return leaves and announce_exit(state)


def save_checkpoint_and_time(
    state: Run,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    opt_param_scheduler: UserScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Mapping[str, object] | None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    reason: str = "",
) -> None:
    """Save a checkpoint and print the time it took, which counts towards no logging interval. Collective.

    A run without checkpoints warns once.

    Args:
        state: the run's state; its `checkpoints` do the writing.
        model: list of model chunks.
        optimizer: the optimizer that the loop drives.
        opt_param_scheduler: the learning-rate schedule, or None.
        num_floating_point_operations_so_far: of the whole run up to its last logged step; for the progress log, which
            adds those of the steps since.
        checkpointing_context: accepted for compatibility with Megatron Bridge, and ignored.
        non_persistent_ckpt: whether only the newest checkpoint of this kind is kept.
        train_data_iterator: its position is saved; None saves none.
        reason: why it is saved, for the record.

    Raises:
        CheckpointError: if it cannot be written and `checkpoint.on_save_error` is stop; on all ranks alike.
    """
    if state.checkpoints is None:
        if state.world.is_main:
            warn_once(
                logger, "a save is due, but this run has no directory to save in; set run.name or checkpoint.save"
            )
        return
    timer = "save-checkpoint-non-persistent" if non_persistent_ckpt else "save-checkpoint"
    with state.features.pause("save"):
        with state.timers(timer).measure(barrier=True):
            trained = Trained(model, optimizer, opt_param_scheduler)
            persistent = not non_persistent_ckpt
            save = partial(state.checkpoints.save, trained, train_data_iterator, persistent=persistent, reason=reason)
            state.features.wrap("save", save)()
        state.print_timers([timer])
        if state.cfg.logger.log_progress and not non_persistent_ckpt:
            flops = num_floating_point_operations_so_far + pending_flops(state)
            compute_throughputs_and_append_to_progress_log(state, flops)


def exit_if_decided(state: Run) -> None:
    """End an evaluation that has reported nothing yet; a further set of the same evaluation is finished.

    Raises:
        EvaluationInterrupted: once ranks agree that the process exits.
    """
    if state.exits.decided is not None and state.evaluated.is_restartable:
        raise EvaluationInterrupted(
            f"preempted during an evaluation at step {state.train_state.step}; the same command continues the run"
        )


def random_state_before(state: Run) -> StateDict | None:
    """The random generators before work that a signal may interrupt; None if no signal is handled."""
    return None if state.exits.handler is None else RngState(state.world.device).state_dict()


def restore_random_state(state: Run, before: StateDict | None) -> None:
    """Restore the random generators."""
    if before is not None:
        RngState(state.world.device).load_state_dict(before)


def announce_exit(state: Run) -> bool:
    """Record why the process exits, say it in Megatron Bridge's words, and return True."""
    step = state.train_state.step
    state.exits.exit_announced = True
    if state.exits.decided == "signal":
        handler = state.exits.handler
        name = (handler.signal_name if handler is not None else None) or "a signal on another rank"
        text, author = f"exiting program after receiving {name}.", "signal"
    elif state.exits.decided == "duration":
        minutes = (time.time() - state.start_time) / 60
        text, author = f"exiting program after {minutes:.2f} minutes", "exit_duration_in_mins"
    elif state.exits.decided == "straggler":
        text, author = "Exiting program due to straggler detection.", "straggler detection"
    else:
        text, author = f"exiting program at iteration {step}", "exit_interval"
    reason = f"{text} {state.exits.straggler}".rstrip() if state.exits.decided == "straggler" else text
    state.ending.stopped_by = Request("should_training_stop", author, "", reason, state.world.rank)
    write_decision(state, state.ending.stopped_by)
    if state.world.is_main:
        _say(state, text, reason)
    return True


def _say(state: Run, text: str, reason: str) -> None:
    """Print Megatron Bridge's line with its lines; else log the reason, unless a signal's handler has printed it."""
    handler = state.exits.handler
    if state.prints_console_line:
        print(f"[{text}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ", flush=True)  # noqa: T201 - Bridge's line
    elif state.exits.decided != "signal" or handler is None or not handler.received:
        logger.info("%s", reason)


def _why_saved(state: Run, is_due_or_requested: bool) -> str:
    if not is_due_or_requested:
        return f"before exiting ({state.exits.decided})"
    every = state.train_state.overrides.get("save_interval", state.cfg.checkpoint.save_interval)
    return f"every {every} steps" if is_due(state.train_state.step, every) else "requested, or an epoch ended"
