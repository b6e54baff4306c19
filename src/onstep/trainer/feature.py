"""The feature by which a run logs, evaluates, saves and counts through the methods of its `Trainer`."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from onstep.checkpoint import SaveRequest
from onstep.checkpoint.catalog.unfinished import being_written
from onstep.config import TrainingArguments
from onstep.config.hf.argument import LOG_LEVELS
from onstep.events import Callback, CallbackContext, Request
from onstep.metrics.memory_peaks import MemoryPeaks
from onstep.optim import RecallsRates
from onstep.trainer.computing.own_attributes import OwnAttributes
from onstep.trainer.loads import Load, by_methods
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.methods.saving import writes_weights_beside
from onstep.trainer.methods.state_files import READERS, STATE_METHODS
from onstep.trainer.output_dir.files import files_of_checkpoint
from onstep.trainer.overrides import overrides, replaces
from onstep.trainer.reporting.changed_arguments import watched_arguments
from onstep.trainer.reporting.input_counts import InputCounts
from onstep.training.compute.step import LastStep
from onstep.training.feature import Feature
from onstep.training.protocols import Metrics
from onstep.training.run import Run


class CheckpointPushes(Callback):
    """Calls `_push_from_checkpoint` for each checkpoint that is committed, after the callbacks that add files to it."""

    def __init__(self, trainer: TrainerMethods) -> None:
        self._trainer = trainer

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Upload what `hub_strategy` says."""
        self._trainer._push_from_checkpoint(str(context.checkpoint_path))


class TrainerFeature(Feature[Run]):
    """Calls a Trainer's methods where the loop logs, evaluates, saves and counts.

    The methods of `Trainer` itself do what the loop does without one; a subclass overrides them.
    """

    name = "trainer"
    when = "onstep.Trainer"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """In the session of a Trainer."""
        return host.trainer is not None

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self._trainer = trainer = host.trainer
        self._session, args = trainer.session, trainer.args
        self._trains, validation = self._session.trains, host.cfg.validation
        self.logs_skipped_losses = not args.logging_nan_inf_filter
        self.evaluates_last_step = validation.eval_after_training and not validation.eval_each_epoch
        """As with `eval_steps` of Hugging Face's Trainer."""
        self._check_arguments = watched_arguments(args, host.args) if self._trains else None
        self.started = time.time()
        """When the training began, in Unix seconds."""
        self._passes_start = len(inspect.signature(trainer.log).parameters) > 1
        is_own_count = overrides(trainer, "floating_point_ops") or overrides(trainer, "store_flos")
        self._counts_flops = is_own_count or trainer.follows_transformers
        self._tracks = overrides(trainer, "_track_num_input_tokens")
        self._saves = any(
            overrides(trainer, name) for name in ("_save_checkpoint", "save_model", "_save", *STATE_METHODS)
        )
        self._saves |= any(replaces(trainer, name) for name in READERS)
        self._saves |= self._trains and writes_weights_beside(trainer.model, trainer.args)
        self.writes_directly = False
        """Whether the user's method that saves is running, and calls for the checkpoint."""
        self._written: dict[int, bool] = {}
        """Whether the user's method that saves called `super()`, by step; empty again after a rollback."""

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count the inputs, measure the memory of a training, and upload its checkpoints."""
        trainer, kind = self._trainer, str(self._trainer.args.include_num_input_tokens_seen)
        counts: InputCounts | None = None
        added: list[Callback] = []
        if self._trains and (kind != "no" or self._counts_flops or self._tracks or trainer.memory.enabled):
            options = {"counts_flops": self._counts_flops, "tracks": self._tracks}
            counts = InputCounts(trainer, self.host, kind=kind, **options)
            added.append(counts)
        if self._trains and trainer.follows_transformers:
            added.append(OwnAttributes(trainer))
        if self._trains and trainer.args.push_to_hub:
            trainer.sweep_uploads()
            added.append(CheckpointPushes(trainer))
        for callback in added:
            trainer.callback_manager.add(callback)
        if self._trains:
            trainer.input_counts = counts if kind != "no" else None
        try:
            with replica_level(trainer.args), self._memory_measured():
                yield
        finally:
            for callback in added:
                trainer.callback_manager.remove(callback)

    def _memory_measured(self) -> AbstractContextManager[object]:
        peaks = self.host.features.room(MemoryPeaks)
        return self._trainer.memory.measured("train", peaks) if self._trains else nullcontext()

    def before_log(self) -> None:
        """Warn of arguments that have changed."""
        if self._check_arguments is not None:
            self._check_arguments()

    def add_to_log(self, logs: Metrics) -> None:
        """The rate of the last step's update, of the first parameter group, as in Hugging Face's records."""
        step, scheduler = self.host.features.room(LastStep).step, self._session.scheduler
        if isinstance(scheduler, RecallsRates) and step is not None and step.applied:
            logs["learning_rate"] = scheduler.rates_before_last_step()[0]
        else:
            logs["learning_rate"] = float(self._session.optimizer.param_groups[0]["lr"])
        if self._trainer.follows_transformers and step is not None and step.grad_norm is not None:
            logs["grad_norm"] = float(step.grad_norm)

    def add_to_checkpoint(self, request: SaveRequest) -> None:
        """The files that Hugging Face's tools look for, as of now."""
        if self.host.run_dir is not None and self.host.run_dir.layout == "hugging_face":
            request.write_beside = files_of_checkpoint(self._trainer)

    def wrap_log(self, append: Callable[[Metrics], None]) -> Callable[[Metrics], None]:
        """`Trainer.log`, with the start of the training for the record of a step, if it accepts one."""

        def log(logs: Metrics) -> None:
            if self._passes_start and "loss" in logs:
                self._trainer.log(logs, self.started)
            else:
                self._trainer.log(logs)

        return log

    def wrap_count_flops(self, count: Callable[[float], None]) -> Callable[[float], None]:
        """`Trainer.store_flos`, if the user counts. Collective."""
        return (lambda tokens: self._trainer.store_flos()) if self._counts_flops else count

    def wrap_evaluate(self, evaluate: Callable[[], None]) -> Callable[[], None]:
        """The evaluation of all sets by `Trainer.evaluate`. Collective."""
        return lambda: self._trainer.evaluate_in_run(self._session.ignore_keys)

    def wrap_save(self, write: Callable[..., None]) -> Callable[[], None]:
        """A save through `Trainer._save_checkpoint`; where it does not call `super()`, what it wrote is the save.

        It is called once for a step, as by Hugging Face's Trainer. The end of training saves the last step again, since
        it adds a record: what was written beside the first checkpoint is kept.
        """
        if not self._saves and not overrides(self._trainer, "_maybe_log_save_evaluate"):
            return write
        run, trainer, step, written = self.host, self._trainer, self.host.train_state.step, self._written

        def write_for_user() -> None:
            written[step] = True
            write(adopts=True)
            if run.checkpoints is not None:
                run.checkpoints.finish()  # the user's code may add files to the checkpoint

        def save() -> None:
            if written.get(step) or self.writes_directly or not self._saves:
                write_for_user()
                return
            if step not in written:
                written[step] = False
                outer, trainer.write_checkpoint = trainer.write_checkpoint, write_for_user
                path = os.path.join(trainer._get_output_dir(trainer._trial), f"checkpoint-{step}")
                try:
                    with being_written(path, is_main=run.world.is_main), self.saving_to(path):
                        trainer._save_checkpoint(trainer.model, trainer._trial)
                finally:
                    trainer.write_checkpoint = outer
                if not written[step]:
                    self._session.notify.on_checkpoint_save(checkpoint_step=step, checkpoint_path=path)
            if run.checkpoints is not None:
                run.checkpoints.saved_mark = run.mark

        return save

    @contextmanager
    def saving_to(self, directory: str) -> Iterator[None]:
        """Let the user's methods write to the directory of a checkpoint.

        What they have left to it is written afterwards if they have not called for it.
        """
        trainer, step = self._trainer, self.host.train_state.step
        before = trainer.due_directory, trainer.left_to_checkpoint
        trainer.due_directory, trainer.left_to_checkpoint = directory, []
        try:
            yield
            if not self._written.get(step):
                for write in trainer.left_to_checkpoint:
                    write()
        finally:
            trainer.due_directory, trainer.left_to_checkpoint = before

    def rolled_back(self, bad_step: int, request: Request) -> None:
        """Steps that are repeated are saved again."""
        self._written.clear()

    def wrap_load(self, load: Load) -> Load:
        """What a run loads, through the user's methods that load parts of it. Collective."""
        return by_methods(self._trainer, load)


@contextmanager
def replica_level(args: TrainingArguments) -> Iterator[None]:
    """Set the level of Onstep's messages to `log_level_replica`, except on the ranks that report."""
    level = LOG_LEVELS[args.log_level_replica]
    if args.should_log or level is None:
        yield
        return
    log = logging.getLogger("onstep")
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)
