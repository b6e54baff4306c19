"""Decides on checkpoints and exits at the end of a step, in one place for all ranks."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from onstep.checkpoint import RngState
from onstep.errors import warn_once
from onstep.events import Request
from onstep.training.feature import is_due
from onstep.training.protocols import StateDict, Trained
from onstep.training.run import Run
from onstep.training.runs.signals import Preempted
from onstep.training.stages.agreement import write_decision
from onstep.training.stages.progress_log import compute_throughputs_and_append_to_progress_log, pending_flops

logger = logging.getLogger(__name__)


@dataclass
class CurrentEvaluation:
    """An evaluation in progress, of one data set or of several."""

    has_reported: bool = False
    """Whether the result of a set is reported: the evaluation may then not be aborted and repeated."""


class EvaluationInterrupted(Preempted):
    """A signal or time limit ended an evaluation; training saves the state from before it, other callers just exit."""


def save_and_decide_exit(run: Run, trained: Trained, reader: Any, flops: float, *, saves_at_end: bool = False) -> bool:
    """Save what is due or requested, and decide whether the process exits now. Collective; it only reads decisions.

    A process that exits (signal, end of the SLURM job, `train.exit_duration_in_mins`, a slow rank with
    `stop_if_detected`, `train.exit_interval`) saves first, once, if the run has checkpoints and anything has changed
    since the last one.

    Args:
        run: its `checkpoints` do the writing.
        trained: what is saved.
        reader: its position is saved; None saves none.
        flops: of the whole run up to its last logged step; for the progress log.
        saves_at_end: training is at its end, where it saves anyway: a save that is due waits for that.

    Returns:
        True if training should end here; `run.exits.decided` says why.
    """
    step, exits = run.train_state.step, run.exits
    is_last = run.train_iters is not None and step >= run.train_iters
    if exits.decided in ("duration", "straggler") and is_last:
        exits.decided, exits.straggler = None, ""
    may_leave = exits.decided is None and not is_last and run.stage.has_stepped
    if may_leave and is_due(step, run.cfg.train.exit_interval):
        exits.decided = "interval"
    every = run.cfg.checkpoint.non_persistent_save_interval
    is_requested = run.control.should_save
    run.control.clear("should_save")
    if keeps_in_memory(run) and not is_last and not run.leaves:
        _save_in_memory(run, trained, reader)
    if (is_requested and not saves_at_end) or (run.leaves and run.is_unsaved):
        save_and_time(run, trained, reader, flops, reason=_why_saved(run, is_requested))
    elif not is_requested and run.is_unsaved and is_due(step, every) and not keeps_in_memory(run):
        reason = f"every {every} steps, not persistent"
        save_and_time(run, trained, reader, flops, persistent=False, reason=reason)
    return run.leaves


def keeps_in_memory(run: Run) -> bool:
    """Whether the state of this step is due in the memory of the nodes; the same on all ranks."""
    config, step = run.cfg.checkpoint, run.train_state.step
    return config.non_persistent_place == "memory" and is_due(step, config.non_persistent_save_interval)


def _save_in_memory(run: Run, trained: Trained, reader: Any) -> None:
    """Keep the state in the memory of the nodes, beside the checkpoints on the disk, and print its time. Collective."""
    if run.checkpoints is None or not run.is_unsaved:
        return
    timer = "save-checkpoint-non-persistent"
    with run.features.pause("save"):
        with run.timers(timer).measure(barrier=True):
            run.checkpoints.save_in_memory(trained, reader)
        run.print_timers([timer])


def save_and_time(
    run: Run, trained: Trained, reader: Any, flops: float, *, persistent: bool = True, reason: str = ""
) -> None:
    """Save a checkpoint and print the time it took, which counts towards no logging interval. Collective.

    A run without checkpoints warns once.

    Args:
        run: its `checkpoints` do the writing.
        trained: what is saved.
        reader: its position is saved; None saves none.
        flops: of the whole run up to its last logged step; for the progress log, which adds those of the steps since.
        persistent: False keeps only the newest checkpoint of this kind.
        reason: why it is saved, for the record.

    Raises:
        CheckpointError: if it cannot be written and `checkpoint.on_save_error` is stop; on all ranks alike.
    """
    if run.checkpoints is None:
        if run.world.is_main:
            warn_once(
                logger, "a save is due, but this run has no directory to save in; set run.name or checkpoint.save"
            )
        return
    timer = "save-checkpoint" if persistent else "save-checkpoint-non-persistent"
    with run.features.pause("save"):
        with run.timers(timer).measure(barrier=True):
            save = partial(run.checkpoints.save, trained, reader, persistent=persistent, reason=reason)
            run.features.wrap("save", save)()
        run.print_timers([timer])
        if run.cfg.logger.log_progress and persistent:
            compute_throughputs_and_append_to_progress_log(run, flops + pending_flops(run))


def exit_if_decided(state: Run) -> None:
    """End an evaluation that has reported nothing yet; a further set of the same evaluation is finished.

    Raises:
        EvaluationInterrupted: once ranks agree that the process exits.
    """
    if state.exits.decided is not None and not state.features.room(CurrentEvaluation).has_reported:
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


def announce_exit(state: Run) -> None:
    """Record why the process exits, and say it in Megatron Bridge's words."""
    step = state.train_state.step
    if state.exits.decided == "signal":
        handler = state.exits.handler
        name = (handler.signal_name if handler is not None else None) or "a signal on another rank"
        text, author = f"exiting program after receiving {name}.", "signal"
    elif state.exits.decided == "allocation":
        text, author = f"exiting program before {_allocation(state)} ends.", "SLURM"
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


def _allocation(state: Run) -> str:
    """The allocation that ends, and in how many seconds; only rank 0 knows it."""
    limit = state.exits.allocation
    return (
        "the SLURM job"
        if limit is None
        else f"SLURM job {limit.allocation.job}, of which {limit.seconds_left:.0f} s are left,"
    )


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
