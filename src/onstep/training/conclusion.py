"""The end of training: why, the final metrics, the last checkpoint, and leaving the process."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from onstep.events import Request
from onstep.training.actions import save_and_decide_exit
from onstep.training.decisions import write_decision
from onstep.training.exits import save_checkpoint_and_time, say_exit
from onstep.training.log_step import advance_tokens, final_metrics, publish
from onstep.training.loop import Loop, has_all_steps
from onstep.training.signals import Preempted
from onstep.training.state import GlobalState
from onstep.training.step import TrainStepResult

logger = logging.getLogger(__name__)


def conclude(loop: Loop) -> None:
    """Say why training ended, log the final metrics and save; an aborted run logs and saves nothing more."""
    state, control = loop.state, loop.state.control
    loop.watch.check(wait=True)
    leaves = state.exits.decided is not None
    state.was_stopped = leaves or is_stopped(state)
    if leaves and not state.exits.is_said:  # it was decided before the first step
        say_exit(state)
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
    metrics = final_metrics(state, loop.start)
    loop.tell("on_final_metrics", logs=metrics)
    publish(state, metrics, loop.tell)
    state.was_concluded = state.is_unsaved = True


def save_at_end(loop: Loop) -> None:
    """Save the state that the training ended with, so that it can be extended.

    Not where the policy `stop` ended it: a device tells late of a bad step, and the counters may be ahead of the
    weights.
    """
    state = loop.state
    if state.ended_by_anomaly:
        return
    if state.checkpoints is None or not state.cfg.checkpoint.save_at_end or not state.is_unsaved:
        return
    state.save_reason = "the training ended"
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


def leave_for_rerun(loop: Loop, result: TrainStepResult) -> NoReturn:
    """A result is suspicious: leave, with a checkpoint of before the step where it is to be computed elsewhere.

    The step in question is not counted; the decision, with the diagnosis, is recorded as one about it.

    Raises:
        SystemExit: 16 to be started again, on another device if possible; 17 when the fault is known.
    """
    state = loop.state
    if result.should_checkpoint:
        state.rerun_state_machine.go_back()
        state.save_reason = "before leaving, for a result to be computed again"
        reader = loop.reader if loop.position_before is None else _Standing(loop.position_before)
        flops = state.train_state.floating_point_operations_so_far
        save_checkpoint_and_time(
            state, loop.model, loop.optimizer, loop.scheduler, flops, None, train_data_iterator=reader
        )
        if state.checkpoints is not None:
            state.checkpoints.finish()
    has_saved = result.should_checkpoint and state.checkpoints is not None
    details = {"exit_code": result.exit_code, "checkpoint": has_saved}
    reason = state.rerun_state_machine.verdict or ""
    decision = Request("rerun_exit", "rerun state machine", "", reason, state.world.rank, details)
    write_decision(state, decision, state.train_state.step + 1)
    raise SystemExit(result.exit_code)


class _Standing:
    """A reader that has not read: it stands where the step began."""

    def __init__(self, position: dict[str, Any]) -> None:
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        return self._position


def leave_if_preempted(state: GlobalState) -> None:
    """End the process where a signal asked for it, with the exit code that says: start me again.

    Raises:
        Preempted: a SystemExit with code 75.
    """
    if state.exits.decided == "signal":
        raise Preempted(f"preempted at step {state.train_state.step}; the same command continues the run")
