"""The size of the next step, where batches grow during a run."""

from __future__ import annotations

from onstep.training.exits import save_checkpoint_and_time
from onstep.training.loop import Loop, is_finished
from onstep.training.state import GlobalState


def take_up_size(loop: Loop) -> None:
    """Take up the size of the next step, and save where it has grown. Collective then.

    Called as soon as a step is done with, since the end of an epoch depends on the size.
    """
    state = loop.state
    if not has_grown(state) or is_finished(state) or not saves_growth(state) or not state.is_unsaved:
        return
    state.save_reason = f"the batch grows to {state.current_global_batch_size} samples"
    loop.watch.check(wait=True)
    if is_finished(state) or state.ended_by_anomaly:
        return
    flops = state.train_state.floating_point_operations_so_far
    save_checkpoint_and_time(
        state, loop.model, loop.optimizer, loop.scheduler, flops, None, train_data_iterator=loop.reader
    )


def has_grown(state: GlobalState) -> bool:
    """Set the number of micro-batches of the next step from the consumed samples; whether it became larger."""
    before = state.num_microbatches
    set_size(state)
    assert state.num_microbatches >= before, f"micro-batches of a step went from {before} to {state.num_microbatches}"
    return state.num_microbatches > before


def saves_growth(state: GlobalState) -> bool:
    """Whether the run saves of its own accord, and so where its batch grows."""
    options = state.cfg.checkpoint
    is_saving = options.save_interval is not None or options.save_each_epoch or options.save_at_end
    return state.checkpoints is not None and is_saving


def set_size(state: GlobalState) -> None:
    """Set the number of micro-batches of the next step from the consumed samples, where batches grow."""
    sizes = state.batch_sizes
    if sizes is not None and sizes.varies:
        sizes.update(state.train_state.consumed_train_samples, verbose=state.world.is_main)
        state.num_microbatches = sizes.num_micro_batches
