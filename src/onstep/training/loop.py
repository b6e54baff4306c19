"""The training loop, on one page. Everything optional is a feature: `features.py` lists them all, in order."""

from __future__ import annotations

from collections.abc import Callable

from onstep.data import StepBatches
from onstep.training.compute.loss_sums import LossForms, reduce_step
from onstep.training.compute.step import LastStep, Step
from onstep.training.engines import engine_of
from onstep.training.stages import actions
from onstep.training.stages import data_position as position
from onstep.training.stages import forward_backward as compute
from onstep.training.stages.agreement import agree
from onstep.training.stages.ending import conclude, early_end
from onstep.training.stages.job import Job


class Loop:
    """Trains until the run is over. Collective. `on` runs the features' hooks, `notify` fires the user's events."""

    def __init__(self, job: Job) -> None:
        self.job, self.run, self.notify, self.on = job, job.run, job.notify, job.run.features
        self.last, self.forms, wrap = self.on.room(LastStep), self.on.room(LossForms), self.on.wrap
        self.forms.known.clear()  # another training may report other losses
        self.act: Callable[[Job], object] = wrap("act", actions.act_of(job))
        self.iterate: Callable[[], bool] = wrap("iterate", self.read_and_train)
        self.read: Callable[[], StepBatches | None] = wrap("read", lambda: position.read(job))
        self.train_step: Callable[[Step], None] = wrap("step", self.compute_and_update)
        self.compute: Callable[[Step], None] = wrap("compute", engine_of(job).compute)
        self.update: Callable[[Step], None] = wrap("update", self.prepare_and_apply)

    def train(self) -> None:
        """Run the training from the current position, with the features' sessions open."""
        run, on, job = self.run, self.on, self.job
        position.prepare(job)
        on.opening()
        self.notify.on_train_start()
        position.go_to(job)
        on.begin()
        on.ready()
        with early_end(job):
            if not run.is_over or run.has_unfinished_end:
                self.start_or_pick_up()
            actions.restart_interval(job)
            while not run.is_over:
                self.train_epoch()
        conclude(job)
        on.end()
        run.ending.training = "after"
        self.notify.on_train_end()

    def start_or_pick_up(self) -> None:
        """Evaluate before the first step if configured, or do what was still pending at the checkpoint."""
        run = self.run
        if run.is_resumed:
            self.act(self.job)
            if run.is_over and run.stage.epoch_is_open and not run.leaves:
                self.end_epoch(has_data=True)
        elif run.cfg.validation.eval_on_start:
            actions.run_evaluation(self.job)
            agree(run)

    def train_epoch(self) -> None:
        """Train for one epoch, or the rest of one; ends early when a stop is decided."""
        run, control, reader, has_data = self.run, self.run.control, self.job.reader, True
        position.begin_epoch(run)
        self.notify.on_epoch_start()
        agree(run)
        while has_data and not run.is_over and not control.should_epoch_stop:
            has_data = reader.has_next(run.num_microbatches) and self.iterate()
        if not run.leaves:
            self.end_epoch(has_data)

    def end_epoch(self, has_data: bool) -> None:
        """Advance to the next epoch if this one is over, and do what is due then."""
        position.end_epoch(self.job, has_data)
        actions.mark_due_after_an_epoch(self.run)
        self.notify.on_epoch_end()
        self.act(self.job)

    def read_and_train(self) -> bool:
        """Read the next step's micro-batches and train on them, or skip them; False at the end of the data."""
        run, on = self.run, self.on
        on.before_iteration()
        if position.is_skipped(run):
            return position.skip_step(self.job, self.read())
        self.notify.on_step_begin()
        if (batches := self.read()) is None:
            return False
        step = self.last.begin(run.train_state.step + 1, batches)
        self.notify.on_train_step_start(step)
        self.train_step(step)
        self.notify.on_train_step_end(step)
        on.after_train_step(step)
        position.count(self.job, step)
        on.after_count(step)
        actions.mark_due(run)
        self.notify.on_step_end()
        self.act(self.job)
        on.after_iteration(step)
        return True

    def compute_and_update(self, step: Step) -> None:
        """Forward and backward passes, one update, and the schedule."""
        self.compute(step)
        step.total = reduce_step(step.micros, self.run.world, self.forms)
        step.factor = compute.gradient_factor_of(self.job, step)
        self.update(step)
        self.notify.on_optimizer_step(step)
        self.on.after_update(step)
        if step.applied and self.job.scheduler is not None:
            self.job.scheduler.step(self.job.schedule_increment(step.batches))
        self.notify.on_train_metrics(step)

    def prepare_and_apply(self, step: Step) -> None:
        """Unscale, measure and clip the gradients; then apply them, unless a gate rejects them."""
        optimizer = self.job.optimizer
        optimizer.observe_loss(step.total.numerator)
        norm = optimizer.prepare(step.factor, needs_norm=compute.needs_norm(self.job))
        step.grad_norm = None if optimizer.overflowed else norm
        self.on.before_update(step)
        self.notify.on_pre_optimizer_step(step)
        step.applied = self.on.admits(step) and optimizer.apply()
        step.grad_norm, step.num_zeros = optimizer.grad_norm, optimizer.num_zeros
