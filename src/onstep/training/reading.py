"""Reading a step's micro-batches, or passing over them where the step is to be skipped."""

from __future__ import annotations

import logging

from onstep.data import StepBatches
from onstep.pulse import PULSE
from onstep.training.conclusion import give_up_on_data
from onstep.training.data_wait import DataTimeout, wait_for_data
from onstep.training.growth import take_up_size
from onstep.training.loop import Loop
from onstep.training.state import GlobalState
from onstep.training.step import samples_of

logger = logging.getLogger(__name__)


def read_batches(loop: Loop) -> StepBatches | None:
    """The next step's micro-batches; None at the end of the epoch.

    Raises:
        DataTimeout: when a signalled run gives up on them.
    """
    state = loop.state
    PULSE.doing = "reading a batch"
    PULSE.beats += 1
    with state.timers("batch-generator"), state.straggler_timer(bdata=True):
        batches: StepBatches | None = wait_for_data(
            lambda: loop.reader.read(state.num_microbatches), state.exits.handler, state.cfg.train.data_timeout
        )
    return batches


def read_or_leave(loop: Loop) -> tuple[StepBatches | None, bool]:
    """What `read_batches` gives, and whether the run leaves because it gave up on the data."""
    try:
        return read_batches(loop), False
    except DataTimeout as timeout:
        logger.warning("%s", timeout)
        give_up_on_data(loop)
        return None, True


def is_passed_over(state: GlobalState) -> bool:
    """Whether the next step is one of `train.iterations_to_skip`."""
    skipped = state.cfg.train.iterations_to_skip
    return bool(skipped) and state.train_state.step + 1 in skipped


def pass_over(loop: Loop) -> bool:
    """Count the next step without training on it; False at the end of the data.

    Its samples count as consumed and as skipped, the schedule stands still, and nothing else happens at it: nobody is
    told, and nothing is logged, evaluated or saved. Only where the batch grows with them is a checkpoint written, as
    after any other step.
    """
    batches, leaves = read_or_leave(loop)
    if batches is None:
        return leaves
    state = loop.state
    samples = samples_of(batches, state)
    advance(state, samples)
    state.train_state.skipped_train_samples += samples
    loop.start.pass_over(samples)
    state.rerun_state_machine.current_iteration = state.train_state.step
    if state.world.is_main:
        logger.info(
            "passed over step %d and its %d samples (train.iterations_to_skip)", state.train_state.step, samples
        )
    take_up_size(loop)
    return True


def advance(state: GlobalState, samples: int) -> None:
    """Count a step of `samples` samples."""
    progress = state.train_state
    progress.step += 1
    progress.steps_in_epoch += 1
    progress.samples_in_epoch += samples
    progress.consumed_train_samples += samples
    state.is_unsaved = True


def note_decrease(state: GlobalState) -> None:
    """Count the samples by which the step that just ran was smaller than configured, as skipped."""
    sizes = state.batch_sizes
    if sizes is not None:
        decrease = sizes.current_global_batch_size - sizes.current_running_global_batch_size
        state.train_state.skipped_train_samples += decrease
