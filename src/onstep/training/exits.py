"""Checkpoints and exits at the end of a step: decided in one place, for all ranks."""

from __future__ import annotations

import logging
import time
from datetime import datetime
from typing import Any

from torch import nn

from onstep.checkpoint import RngState
from onstep.events import Request
from onstep.schedules import is_due
from onstep.training.decisions import setting, write_decision
from onstep.training.interval_time import print_timers
from onstep.training.progress_log import compute_throughputs_and_append_to_progress_log, pending_flops
from onstep.training.run import Run
from onstep.training.seams import UserOptimizer, UserScheduler
from onstep.training.signals import Preempted

logger = logging.getLogger(__name__)


class EvaluationInterrupted(Preempted):
    """A signal or time limit ended an evaluation; the training saves from before it, anything else just leaves."""


def checkpoint_and_decide_exit(
    state: Run,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    opt_param_scheduler: UserScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any] | None,
    train_data_iterator: Any,
) -> bool:
    """Save what is due or asked for, and decide whether the process leaves now. Collective; it only reads decisions.

    A process that leaves (signal, `train.exit_duration_in_mins`, a slow rank with `stop_if_detected`,
    `train.exit_interval`) saves first, once, where there are checkpoints and anything has changed since the last one.

    Args:
        state: the run's; its `checkpoints` write.
        model: list of model chunks.
        optimizer: what the loop drives.
        opt_param_scheduler: the learning-rate schedule, or None.
        num_floating_point_operations_so_far: of the whole run until its last logged step; for the progress log.
        checkpointing_context: accepted for callers written for Megatron Bridge, and not read.
        train_data_iterator: its position is saved; None saves none.

    Returns:
        True if training should end here; `state.exits.decided` says why.
    """
    step, exits = state.train_state.step, state.exits
    is_last = state.train_iters is not None and step >= state.train_iters
    if exits.decided in ("duration", "straggler") and is_last:
        exits.decided, exits.straggler = None, ""
    if (
        exits.decided is None
        and not is_last
        and state.stage.has_stepped
        and is_due(step, state.cfg.train.exit_interval)
    ):
        exits.decided = "interval"
    if exits.decided is None and not is_last:
        state.features.before_exit_decision()
    leaves = exits.decided is not None
    persistent_is_due = state.control.should_save
    state.control.honoured("should_save")
    non_persistent_is_due = is_due(step, state.cfg.checkpoint.non_persistent_save_interval)
    if (persistent_is_due and not state.saving.saves_at_end) or (leaves and state.saving.is_unsaved):
        non_persistent = False
        state.saving.save_reason = _why_saved(state, persistent_is_due)
    elif non_persistent_is_due and state.saving.is_unsaved and not persistent_is_due:
        non_persistent = True
        state.saving.save_reason = f"every {state.cfg.checkpoint.non_persistent_save_interval} steps, not persistent"
    else:
        return leaves and say_exit(state)
    save_checkpoint_and_time(
        state,
        model,
        optimizer,
        opt_param_scheduler,
        num_floating_point_operations_so_far,
        checkpointing_context,
        non_persistent_ckpt=non_persistent,
        train_data_iterator=train_data_iterator,
    )
    return leaves and say_exit(state)


def save_checkpoint_and_time(
    state: Run,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    opt_param_scheduler: UserScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any] | None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
) -> None:
    """Save a checkpoint, and print what it took; that time belongs to no logging interval. Collective.

    A run without checkpoints warns once.

    Args:
        state: the run's; its `checkpoints` write.
        model: list of model chunks.
        optimizer: what the loop drives.
        opt_param_scheduler: the learning-rate schedule, or None.
        num_floating_point_operations_so_far: of the whole run until its last logged step; for the progress log, which
            adds those of the steps since.
        checkpointing_context: accepted for callers written for Megatron Bridge, and not read.
        non_persistent_ckpt: whether it is one of which only the newest is kept.
        train_data_iterator: its position is saved; None saves none.

    Raises:
        CheckpointError: when it cannot be written and `checkpoint.on_save_error` is stop; on all ranks alike.
    """
    if state.checkpoints is None:
        _warn_that_nothing_is_saved(state)
        return
    timer = "save-checkpoint-non-persistent" if non_persistent_ckpt else "save-checkpoint"
    with state.features.paused("save"):
        with state.timers(timer).measure(barrier=True):
            state.checkpoints.save(model, optimizer, opt_param_scheduler, train_data_iterator, not non_persistent_ckpt)
        print_timers(state, [timer])
        if state.cfg.logger.log_progress and not non_persistent_ckpt:
            flops = num_floating_point_operations_so_far + pending_flops(state)
            compute_throughputs_and_append_to_progress_log(state, flops)


def leave_if_decided(state: Run) -> None:
    """End an evaluation of which nothing was reported yet; a further set of the same evaluation is finished.

    Raises:
        EvaluationInterrupted: once ranks agree that the process leaves.
    """
    if state.exits.decided is not None and state.evaluated.is_restartable:
        raise EvaluationInterrupted(f"preempted in an evaluation at step {state.train_state.step}")


def random_state_before(state: Run) -> Any:
    """The random generators before something that a signal may interrupt; None where no signal is handled."""
    return None if state.exits.handler is None else RngState(state.world.device).state_dict()


def restore_random_state(state: Run, before: Any) -> None:
    """Put the random generators back."""
    if before is not None:
        RngState(state.world.device).load_state_dict(before)


def say_exit(state: Run) -> bool:
    """Print why the process leaves, in Megatron Bridge's words, and remember it as the end's reason; True."""
    step = state.train_state.step
    state.exits.is_said = True
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
        print(f"[{text}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ", flush=True)  # noqa: T201 - Bridge's line
    return True


def _why_saved(state: Run, is_due_or_asked: bool) -> str:
    if not is_due_or_asked:
        return f"before leaving ({state.exits.decided})"
    every = setting(state, "save_interval")
    return f"every {every} steps" if is_due(state.train_state.step, every) else "asked for, or an epoch ended"


def _warn_that_nothing_is_saved(state: Run) -> None:
    if state.world.is_main and not state.saving.warned_of_saving:
        state.saving.warned_of_saving = True
        logger.warning(
            "a save is due at step %d, but this run has no folder to save in; set run.name or checkpoint.save",
            state.train_state.step,
        )
