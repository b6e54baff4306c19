"""Where the loop stands in its data, and how it gets there: at the start, from a checkpoint, in the next epoch."""

from __future__ import annotations

import logging

from onstep.data import IteratorReader
from onstep.errors import DataError
from onstep.training.decisions import agree
from onstep.training.growth import set_size
from onstep.training.loop import Loop
from onstep.training.progress_log import log_job_start, pending_flops
from onstep.training.rerun import RerunStateMachine
from onstep.training.rerun_step import restore_buffers, save_buffers

logger = logging.getLogger(__name__)


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
    prepare_reruns(loop)
    if state.checkpoints is not None:
        state.checkpoints.components.check_states(loop.optimizer, loop.scheduler)
        if state.cfg.logger.log_progress:
            log_job_start(state)


def go_to_position(loop: Loop) -> None:
    """Move data, log interval and random generators to where the checkpoint was taken. Collective."""
    state = loop.state
    if state.checkpoints is not None and state.is_resumed:
        leave_out_skipped(loop)
        is_enabled, found = state.rerun_state_machine.is_enabled, state.checkpoints.start
        if not is_enabled and found is not None and "rank" not in found.manifest.components:
            state.rank_parts.pop("rerun", None)
        state.checkpoints.load_position(loop.reader, loop.scheduler)
        if not state.rerun_state_machine.is_enabled:
            state.rank_parts.pop("rerun", None)
        state.rerun_state_machine.current_iteration = state.train_state.step
        state.flops_at_start += pending_flops(state)
    set_size(state)
    apply_overrides(loop)
    agree(state)


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
    leave_out_skipped(loop)
    loop.reader.seek(progress.epoch, 0)


def prepare_reruns(loop: Loop) -> None:
    """Start the rerun state machine in its configured mode; a disabled one has nothing to save."""
    state = loop.state
    machine = RerunStateMachine.from_config(
        state.cfg.rerun_state_machine,
        state.world,
        state_save_func=lambda: save_buffers(loop.model),
        state_restore_func=lambda saved: restore_buffers(loop.model, saved),
    )
    machine.current_iteration = state.train_state.step
    state.rerun_state_machine = machine
    if machine.is_enabled or state.is_resumed:  # a disabled one says what the checkpoint has in question
        state.rank_parts["rerun"] = machine


def leave_out_skipped(loop: Loop) -> None:
    """Tell the reader which samples an anomaly left out; one without sample ids cannot, and meets them again."""
    skip_list, leave_out = loop.state.train_state.skip_list, getattr(loop.reader, "leave_out", None)
    if skip_list and leave_out is not None:
        leave_out(skip_list)


def apply_overrides(loop: Loop) -> None:
    """Bring into force what was set while the run went on and acts outside the loop's own decisions."""
    factor = loop.state.train_state.overrides.get("lr_factor", 1.0)
    if getattr(loop.scheduler, "lr_factor", factor) != factor:
        loop.scheduler.lr_factor = factor
