"""Checkpoints and exits at the end of a step: decided in one place, for all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from onstep.checkpoint import RngState
from onstep.events import Request
from onstep.schedules import is_due
from onstep.training.decisions import setting, write_decision
from onstep.training.interval_time import outside_interval, print_timers
from onstep.training.nvrx_straggler import check_nvrx_straggler_detection
from onstep.training.param_sync import hooks_off
from onstep.training.progress_log import compute_throughputs_and_append_to_progress_log, pending_flops
from onstep.training.signals import DistributedSignalHandler, Preempted

if TYPE_CHECKING:
    from onstep.training.state import GlobalState

logger = logging.getLogger(__name__)

ExitKind = Literal["signal", "duration", "straggler", "interval"]


class EvaluationInterrupted(Preempted):
    """A signal or time limit ended an evaluation; the training saves from before it, anything else just leaves."""


@dataclass
class ExitWatch:
    """What ends the process before the run is done, and what a pending save waits for; ranks agree on it."""

    handler: DistributedSignalHandler | None = None
    """None outside of a run and where `train.exit_signal_handler` is off."""
    deadline: float | None = None
    """When `train.exit_duration_in_mins` is over, in seconds of the monotonic clock."""
    decided: ExitKind | None = None
    is_said: bool = False
    """Why the process leaves has been printed."""
    straggler: str = ""
    """Which rank is so slow that the run is to end, in words; nothing otherwise."""
    gpus_checked_at: int | None = None
    """Step at which the detection of `nvidia-resiliency-ext` was asked last."""
    some_rank_writes: bool = False
    """Whether a rank is still writing its files of an asynchronous save."""

    def start(self, state: GlobalState) -> None:
        """Forget an earlier decision, and start the clock of `train.exit_duration_in_mins` if it does not run yet."""
        if self.decided != "signal":
            self.decided = None
        self.is_said, self.straggler = False, ""
        minutes = state.cfg.train.exit_duration_in_mins
        if minutes is not None and self.deadline is None:
            self.deadline = time.monotonic() + 60 * minutes - (time.time() - state.start_time)

    def votes(self, state: GlobalState) -> list[int]:
        """What this rank knows: a signal came; the time is over (rank 0's clock); a rank is too slow; its save is not
        written yet."""
        signalled = self.handler is not None and self.handler.received
        is_late = self.deadline is not None and state.world.is_main and time.monotonic() >= self.deadline
        checkpoints = state.checkpoints
        writes = checkpoints is not None and checkpoints.is_writing
        return [int(signalled), int(is_late), int(bool(self.straggler)), int(writes)]

    def adopt(self, votes: list[int]) -> None:
        """Take the votes of all ranks; a signal wins over the clock, and that over a slow rank."""
        signalled, is_late, is_slow, writes = votes
        if signalled:
            self.decided = "signal"
        elif is_late and self.decided is None:
            self.decided = "duration"
        elif is_slow and self.decided is None:
            self.decided = "straggler"
        self.some_rank_writes = bool(writes)


def checkpoint_and_decide_exit(
    state: GlobalState,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
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
    if exits.decided is None and not is_last and state.has_stepped and is_due(step, state.cfg.train.exit_interval):
        exits.decided = "interval"
    if exits.decided is None and not is_last and _gpu_is_slow(state):
        exits.decided = "straggler"
    leaves = exits.decided is not None
    persistent_is_due = state.control.should_save
    state.control.honoured("should_save")
    non_persistent_is_due = is_due(step, state.cfg.checkpoint.non_persistent_save_interval)
    if (persistent_is_due and not state.saves_at_end) or (leaves and state.is_unsaved):
        non_persistent = False
        state.save_reason = _why_saved(state, persistent_is_due)
    elif non_persistent_is_due and state.is_unsaved and not persistent_is_due:
        non_persistent = True
        state.save_reason = f"every {state.cfg.checkpoint.non_persistent_save_interval} steps, not persistent"
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
    state: GlobalState,
    model: list[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
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
    with outside_interval(state):
        with hooks_off(state), state.timers(timer).measure(barrier=True):
            state.checkpoints.save(model, optimizer, opt_param_scheduler, train_data_iterator, not non_persistent_ckpt)
        print_timers(state, [timer])
        if state.cfg.logger.log_progress and not non_persistent_ckpt:
            flops = num_floating_point_operations_so_far + pending_flops(state)
            compute_throughputs_and_append_to_progress_log(state, flops)


def leave_if_decided(state: GlobalState) -> None:
    """End an evaluation of which nothing was reported yet; a further set of the same evaluation is finished.

    Raises:
        EvaluationInterrupted: once ranks agree that the process leaves.
    """
    if state.exits.decided is not None and state.evaluation_is_whole:
        raise EvaluationInterrupted(f"preempted in an evaluation at step {state.train_state.step}")


@contextmanager
def handled_signals(state: GlobalState) -> Iterator[None]:
    """Turn `train.exit_signals` into a request to save and leave while the block runs; nested blocks share one."""
    train = state.cfg.train
    if not train.exit_signal_handler or state.exits.handler is not None:
        yield
        return
    with DistributedSignalHandler(train.exit_signals) as handler:
        state.exits.handler = handler
        try:
            yield
        finally:
            state.exits.handler = None


def random_state_before(state: GlobalState) -> Any:
    """The random generators before something that a signal may interrupt; None where no signal is handled."""
    return None if state.exits.handler is None else RngState(state.world.device).state_dict()


def restore_random_state(state: GlobalState, before: Any) -> None:
    """Put the random generators back."""
    if before is not None:
        RngState(state.world.device).load_state_dict(before)


def say_exit(state: GlobalState) -> bool:
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
    state.stopped_by = Request("should_training_stop", author, "", reason, state.world.rank)
    write_decision(state, state.stopped_by)
    if state.world.is_main:
        print(f"[{text}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ", flush=True)  # noqa: T201 - Bridge's line
    return True


def _gpu_is_slow(state: GlobalState) -> bool:
    """What the detection of `nvidia-resiliency-ext` says, asked once a step. Collective where it runs."""
    manager, exits = state.nvrx_straggler_manager, state.exits
    if manager is None or exits.gpus_checked_at == state.train_state.step:
        return False
    exits.gpus_checked_at = state.train_state.step
    is_slow = check_nvrx_straggler_detection(manager)
    if is_slow:
        exits.straggler = manager.found
    return is_slow


def _why_saved(state: GlobalState, is_due_or_asked: bool) -> str:
    if not is_due_or_asked:
        return f"before leaving ({state.exits.decided})"
    every = setting(state, "save_interval")
    return f"every {every} steps" if is_due(state.train_state.step, every) else "asked for, or an epoch ended"


def _warn_that_nothing_is_saved(state: GlobalState) -> None:
    if state.world.is_main and not state.warned_of_saving:
        state.warned_of_saving = True
        logger.warning(
            "a save is due at step %d, but this run has no folder to save in; set run.name or checkpoint.save",
            state.train_state.step,
        )
