"""Sets the size of the next step when the batch size is ramped up during a run."""

from __future__ import annotations

from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.stages.data_position import update_batch_size
from onstep.training.stages.ending import save_now
from onstep.training.stages.job import Job


class BatchRampup(Feature[Job]):
    """Sets the size of the next step as soon as a step is complete, since the end of an epoch depends on it.

    When the batch size increases, a run that saves automatically saves a checkpoint.
    """

    name = "batch_growth"
    when = "train.rampup_batch_size, train.step_batch_size_schedule, train.decrease_batch_size_if_needed"
    collective = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether the sizes vary, or may be smaller than configured."""
        sizes = host.run.batch_sizes
        return sizes is not None and (sizes.varies or host.run.cfg.train.decrease_batch_size_if_needed)

    def after_count(self, step: Step) -> None:
        """Count as skipped the samples by which the step was smaller than configured."""
        run = self.host.run
        sizes = run.batch_sizes
        if sizes is not None and run.cfg.train.decrease_batch_size_if_needed:
            decrease = sizes.current_global_batch_size - sizes.current_running_global_batch_size
            run.train_state.skipped_train_samples += decrease

    def after_iteration(self, step: Step) -> None:
        """Set the size of the next step, and save if it increased. Collective in that case."""
        self.after_skip()

    def after_skip(self) -> None:
        """The same after a skipped step. Collective if the size increased."""
        run, before = self.host.run, self.host.run.num_microbatches
        update_batch_size(run)
        assert run.num_microbatches >= before, f"micro-batches of a step went from {before} to {run.num_microbatches}"
        options = run.cfg.checkpoint
        is_saving = options.save_interval is not None or options.save_each_epoch or options.save_at_end
        saves = run.checkpoints is not None and is_saving and run.is_unsaved
        if run.num_microbatches == before or run.is_over or not saves:
            return
        run.features.settle()
        if not (run.is_over or run.ending.by_anomaly):
            save_now(self.host, f"batch size ramped up to {run.current_global_batch_size} samples")
