"""Moves the loop through its data: to the start, to the position of a checkpoint, past skipped steps and epochs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from onstep.data import StepBatches
from onstep.errors import DataError
from onstep.optim import ForeignOptimizer
from onstep.training.compute.step import Step
from onstep.training.run import Run
from onstep.training.runs.decisions import BATCHES_TO_SKIP
from onstep.training.stages.first_step import limit_collectives
from onstep.training.stages.job import Job
from onstep.training.stages.progress_log import log_job_start, pending_flops

logger = logging.getLogger(__name__)

_FAILED = -1
"""In place of an amount of data: the rank cannot read."""
_REMEDIES = {
    "micro-batches": "give each rank equally many micro-batches",
    "samples": "each rank reads the whole stream and keeps its share, so the stream must be the same on all ranks; "
    "to give each rank samples of its own, return a DataLoader over them from get_train_dataloader",
}


def prepare(job: Job) -> None:
    """Begin the training, or continue that of a checkpoint, and load the features' states. Collective."""
    run = job.run
    job.begin()
    for chunk in job.model:
        chunk.train()
    job.modes.keep(None)
    if not run.is_resumed:
        run.control.clear_stops()
        run.begin_training()
    run.info.max_steps = run.cfg.train.train_iters or run.info.max_steps
    run.exits.start(run.cfg.train.exit_duration_in_mins, run.start_time)
    run.features.of_the_loop = {"meter": job.accumulator}
    if job.scaler is not None and isinstance(job.optimizer, ForeignOptimizer):
        run.features.of_the_loop["scaler"] = job.scaler
    if run.checkpoints is not None:
        run.checkpoints.check_states(job.trained)
        if run.cfg.logger.log_progress:
            log_job_start(run)
        if run.is_resumed:
            run.checkpoints.load_features()
    run.ending.training = "during"


def go_to(job: Job) -> None:
    """Move data and random generators to the position of the checkpoint. Collective."""
    run = job.run
    if run.checkpoints is not None and run.is_resumed:
        leave_out_skipped(job)
        run.checkpoints.load_position(job.reader, job.scheduler)
    update_batch_size(run)
    run.flops_at_start = run.train_state.floating_point_operations_so_far + pending_flops(run)
    if run.checkpoints is not None:
        run.checkpoints.saved_mark = run.mark


def read(job: Job) -> StepBatches | None:
    """The micro-batches of the next step; None at the end of the data. Collective.

    Where only reading reveals the end, the rank whose data ends first ends the epoch of all, and a step that it cannot
    fill as the others do is dropped: the ranks would wait for each other forever.

    Raises:
        DataError: on all ranks, if one of them raises it.
    """
    run, compared_by = job.run, getattr(job.reader, "compared_by", "micro-batches")
    if compared_by is None:
        return job.reader.read(run.num_microbatches)
    batches: StepBatches | None = None
    error: DataError | None = None
    try:
        batches = job.reader.read(run.num_microbatches)
    except DataError as found:
        error = found
    if run.world.size == 1:
        if error is not None:
            _raise_on_all_ranks(run, error)
        return batches
    own = _FAILED if error is not None else _amount(batches, compared_by)
    amounts = [int(row[0]) for row in run.world.gather_numbers([float(own)])]
    if _FAILED in amounts:
        _raise_on_all_ranks(run, error)
    if len(set(amounts)) == 1:
        return batches
    if run.world.is_main:
        _tell_of_the_first_end(run, amounts, compared_by)
    return None


def _amount(batches: StepBatches | None, compared_by: str) -> int:
    """What the ranks compare of a step, 0 at the end of the data."""
    if batches is None:
        return 0
    return len(batches.micro_batches) if compared_by == "micro-batches" else batches.num_samples or 0


def _raise_on_all_ranks(run: Run, error: DataError | None) -> None:
    """Raise the error on the ranks that have one, and one that names them on the others. Collective."""
    run.ending.lacks_data = True
    texts = run.world.gather(None if error is None else str(error))
    if error is not None:
        raise error
    raise DataError(
        "; ".join(f"{run.world.place(rank)} cannot read: {text}" for rank, text in enumerate(texts) if text)
    )


def _tell_of_the_first_end(run: Run, amounts: list[int], compared_by: str) -> None:
    """Name the ranks whose data ends first, and the remedy."""
    logger.warning(
        "the data of rank %s ends after step %d, and that of other ranks does not (%s for the next step, by rank: %s); "
        "that step is dropped on all ranks; %s",
        ", ".join(str(rank) for rank, amount in enumerate(amounts) if amount == min(amounts)),
        run.train_state.step,
        compared_by,
        amounts,
        _REMEDIES[compared_by],
    )


def update_batch_size(run: Run) -> None:
    """Set the number of micro-batches of the next step from the consumed samples, if the batch size is ramped up."""
    sizes = run.batch_sizes
    if sizes is not None and sizes.varies:
        sizes.update(run.train_state.consumed_train_samples, verbose=run.world.is_main)
        run.num_microbatches = sizes.num_micro_batches


def count(job: Job, step: Step) -> None:
    """Add the step to the log interval, and count it and its samples."""
    run, samples = job.run, step.batches.num_samples
    is_logged = not step.left_out or run.features.logs_skipped_losses
    job.accumulator.add(step.total if is_logged else None, step.grad_norm, step.applied, step.num_zeros)
    advance(run, job.samples_of(step.batches) if samples is None else samples)
    run.stage.has_stepped = True
    if job.tells_of_overflow and job.optimizer.overflowed:
        tell_of_overflow(job)
    if job.start.is_first:
        limit_collectives(run)
        job.start.note_first_step(run, step)


def tell_of_overflow(job: Job) -> None:
    """Say once, on rank 0, that a step is skipped while the loss scale of float16 is found."""
    job.tells_of_overflow = False
    if job.run.world.is_main and job.scaler is not None:
        logger.warning(
            "step %d is skipped: its gradients overflow in float16. The loss scale, %g for the next step, halves until "
            "they fit, and each step up to then is skipped; `skipped_steps` and `loss_scale` are in the log",
            job.run.train_state.step,
            job.scaler.scale,
        )


def advance(run: Run, samples: int) -> None:
    """Count a step of `samples` samples."""
    progress = run.train_state
    progress.step += 1
    progress.steps_in_epoch += 1
    progress.samples_in_epoch += samples
    progress.consumed_train_samples += samples


def is_skipped(run: Run) -> bool:
    """Whether the next step is one of `train.iterations_to_skip`, or was asked to be skipped while the run runs."""
    return _is_configured_skip(run) or BATCHES_TO_SKIP in run.train_state.overrides


def _is_configured_skip(run: Run) -> bool:
    skipped = run.cfg.train.iterations_to_skip
    return bool(skipped) and run.train_state.step + 1 in skipped


def skip_step(job: Job, batches: StepBatches | None) -> bool:
    """Count the next step without training on it; False at the end of the data.

    Its samples count as consumed and as skipped, the schedule does not advance, and nothing else happens: no callback
    is called, and nothing is logged, evaluated or saved. A checkpoint is written only if the batch size increases with
    it, as after any other step.
    """
    if batches is None:
        return False
    run, samples = job.run, job.samples_of(batches)
    why = "train.iterations_to_skip" if _is_configured_skip(run) else _skip_as_requested(run)
    advance(run, samples)
    run.train_state.skipped_train_samples += samples
    job.start.skip_step(samples)
    if run.world.is_main:
        step = run.train_state.step
        logger.info("skipped step %d and its %d samples (%s)", step, samples, why)
    run.features.after_skip()
    return True


def _skip_as_requested(run: Run) -> str:
    overrides = run.train_state.overrides
    overrides[BATCHES_TO_SKIP] -= 1
    if overrides[BATCHES_TO_SKIP] <= 0:
        del overrides[BATCHES_TO_SKIP]
    return "as requested"


def begin_epoch(run: Run) -> None:
    """Open the epoch; a request to end an epoch early applied to the previous one, unless a checkpoint has it open."""
    if not run.stage.epoch_is_open:
        run.control.clear("should_epoch_stop")
    run.stage.epoch_is_open = True


def end_epoch(job: Job, has_data: bool) -> None:
    """Advance to the next epoch if this one is over or is to end early; a raw iterator continues from its position."""
    run, progress = job.run, job.run.train_state
    is_over = not has_data or not job.reader.has_next(run.num_microbatches)
    if is_over:
        check_that_there_was_data(job)
    if job.reader.has_epochs and (is_over or run.control.should_epoch_stop):
        progress.epoch += 0 if run.stage.data_exhausted else 1
        progress.samples_in_epoch = progress.steps_in_epoch = 0
        leave_out_skipped(job)
        job.reader.seek(progress.epoch, 0)
    run.stage.epoch_is_open = False


def check_that_there_was_data(job: Job) -> None:
    """Detect the end of the data: a raw iterator has one epoch, and after an epoch without a step no other follows.

    Raises:
        DataError: if the data does not contain a single step.
    """
    run = job.run
    progress = run.train_state
    if progress.step == 0:
        raise DataError("The training data ended before its first step; it must yield at least one global batch.")
    run.stage.data_exhausted = not job.reader.has_epochs or progress.steps_in_epoch == 0
    if run.stage.data_exhausted and run.world.is_main:
        logger.warning(
            "the training data is exhausted at step %d%s, so training ends and is saved there: a generator or another "
            "iterator is read only once; to train on it again, pass a dataset whose __iter__ starts over",
            progress.step,
            f" of {run.train_iters}" if run.train_iters else "",
        )


def leave_out_now(job: Job, sample_ids: list[int]) -> None:
    """Leave out samples that are still to come in this epoch, or in the next one if nothing is left of it. Collective.

    Raises:
        DataError: for a sample that does not follow, and for data whose samples have no ids; on all ranks alike.
    """
    run, progress = job.run, job.run.train_state
    is_in_epoch = job.reader.has_next(run.num_microbatches)
    find: Callable[[list[int]], list[bool] | None] = getattr(job.reader, "to_come", lambda ids: None)
    found = find(sample_ids)
    if found is None:
        raise DataError("the samples of this data have no ids, so none can be left out; filter the data itself")
    gone = [one for one, is_to_come in zip(sample_ids, found, strict=True) if not is_to_come]
    if is_in_epoch and gone:
        raise DataError(
            f"sample {gone[0]} is not read after step {progress.step} in epoch {progress.epoch}: an earlier step has "
            "read it, or the data has no such sample; start before the step that reads it"
        )
    # an entry becomes effective in the epoch after its own
    progress.skip_list.extend([progress.epoch - int(is_in_epoch), one] for one in sample_ids)
    job.reader.leave_out(progress.skip_list)
    if is_in_epoch:
        job.reader.seek(progress.epoch, progress.samples_in_epoch)


def leave_out_skipped(job: Job) -> None:
    """Pass the samples that an anomaly skipped to the reader; a reader without sample ids will read them again."""
    if job.run.train_state.skip_list:
        job.reader.leave_out(job.run.train_state.skip_list)
