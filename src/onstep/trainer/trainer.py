"""`Trainer`: Hugging Face's constructor and methods on top of the training loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial

from onstep.errors import ConfigError
from onstep.trainer.call import Resume, Session
from onstep.trainer.computing.batch_size_search import with_largest_batch
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.output_dir.claim import unfinished_batch_size
from onstep.trainer.output_dir.files import write_final_files
from onstep.trainer.overrides import check_overrides
from onstep.trainer.predictions import TrainOutput
from onstep.trainer.reporting.argument_errors import errors_name_arguments
from onstep.trainer.session import evaluation_session, training_session
from onstep.trainer.training_checks import check_training
from onstep.training import GlobalState
from onstep.training.pretrain import load_best_model
from onstep.training.run_job import run_job
from onstep.training.setup.final_weights import write_final_weights
from onstep.training.stages.job import Job


class Trainer(TrainerMethods):
    """Trains any `nn.Module` on any map-style or iterable dataset, or an unmodified `transformers` model.

    The arguments are those of `transformers.Trainer`. Batches are mappings, passed to the model as keywords, or tuples,
    passed by position; with `compute_loss_func(outputs, labels)` the last element of a tuple is the labels.

    Args:
        model: the module to train; or `model_init`, which creates a new one for every `train()`.
        args: `onstep.TrainingArguments`, or an instance of Hugging Face's.
        eval_dataset: one dataset, or a dict of them by name.
        callbacks: added after the defaults (DefaultMetrics, ProgressCallback, InfoCallback); an instance of a default's
            class replaces it. A `CallbackManager` is used as is, and extended.
        optimizers: an optimizer and a scheduler, or factories: a callable that creates an optimizer from parameters,
            and one that creates a scheduler from an optimizer.
        tokenizer: `processing_class` under its name in transformers 4.
        default_callbacks: False disables the defaults.

    Raises:
        ConfigError: for incompatible arguments; for a subclass that overrides a method of Hugging Face's Trainer which
            is never called here.
    """

    @errors_name_arguments
    def train(
        self, resume_from_checkpoint: Resume = None, trial: object = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Train as `args` specify. Collective; may be called again to continue training from the model's weights.

        Raises:
            ConfigError: before anything is built.
            DataError: for a dataset that cannot be trained on.
            RunExistsError: if a live process works on `output_dir`.
            NonFiniteError: if a loss or gradient norm is NaN or infinite.
        """
        check_overrides(type(self), vars(self))
        if not hasattr(self, "callback_manager"):
            name = type(self).__name__
            raise ConfigError(f"{name}.__init__ does not call super().__init__(...); call it before it returns.")
        if not self.args.auto_find_batch_size:
            return self._train_once(resume_from_checkpoint, ignore_keys_for_eval)
        resume = resume_from_checkpoint
        return with_largest_batch(
            self,
            lambda is_first: self._train_once(resume if is_first or resume else False, ignore_keys_for_eval),
            unfinished_batch_size(self, resume),
        )

    def _train_once(self, resume_from_checkpoint: Resume, ignore_keys_for_eval: list[str] | None) -> TrainOutput:
        check_training(self, resume_from_checkpoint)
        self.check_evaluation()
        if self.model_init is not None:
            self.model = None
        with training_session(self, resume_from_checkpoint, ignore_keys_for_eval) as session:
            assert session.optimizer is not None
            job = Job.of(
                session.state,
                session.forward_step,
                session.model,
                session.optimizer,
                session.scheduler,
                session.train_data,
                self.callback_manager,
            )
            run_job(job)
            load_best_model(session.state, session.model)
            write_final_weights(session.state, partial(write_final_files, self))
            return _train_output(session.state)

    def _evaluation(self) -> AbstractContextManager[Session]:
        return evaluation_session(self)


def _train_output(state: GlobalState) -> TrainOutput:
    return TrainOutput(state.train_state.step, state.mean_loss(), dict(state.info.history.final_metrics or {}))
