"""`Trainer`: Hugging Face's constructor and methods on top of the training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from onstep.config import TrainingArguments
from onstep.errors import ConfigError
from onstep.events.trainer_state import note_trial
from onstep.past.rewinding import Past
from onstep.record.kinds import Metrics
from onstep.trainer.call import Resume, Session
from onstep.trainer.computing.batch_size_search import with_largest_batch
from onstep.trainer.loads import load_weights_first
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.output_dir.claim import unfinished_batch_size
from onstep.trainer.output_dir.files import write_final_files
from onstep.trainer.overrides import check_overrides, overrides
from onstep.trainer.own_arguments import local_output_dir
from onstep.trainer.predictions import TrainOutput
from onstep.trainer.reporting.argument_errors import errors_name_arguments
from onstep.trainer.rewinding import rewound
from onstep.trainer.search.search import search
from onstep.trainer.session import evaluation_session, job_of, training_session
from onstep.trainer.takeover import current_takeover
from onstep.trainer.training_checks import check_output_dir, check_training
from onstep.trainer.trials.results import BestRun, HPSpace
from onstep.training import GlobalState
from onstep.training.pretrain import load_best_model
from onstep.training.run_job import run_job
from onstep.training.runs.run_dir import RunDir
from onstep.training.setup.final_weights import write_final_weights


class Trainer(TrainerMethods):
    """Trains any `nn.Module` on any map-style or iterable dataset, or an unmodified `transformers` model.

    The arguments are those of `transformers.Trainer`. Batches are mappings, passed to the model as keywords, or tuples,
    passed by position; with `compute_loss_func(outputs, labels)` the last element of a tuple is the labels.

    Args:
        model: the module to train; or `model_init`, which creates a new one for every `train()`.
        args: `onstep.TrainingArguments`, a dict of them, or an instance of Hugging Face's.
        eval_dataset: one dataset, or a dict of them by name.
        callbacks: added after the defaults (DefaultMetrics, ProgressCallback, InfoCallback); an instance of a default's
            class replaces it. A `CallbackManager` is used as is, and extended.
        optimizers: an optimizer and a scheduler, or factories: a callable that creates an optimizer from parameters,
            and one that creates a scheduler from an optimizer.
        tokenizer: `processing_class` under its name in transformers 4.
        default_callbacks: False disables the defaults.
        optimizer_factory: makes the optimizer of the trainable parameters, or, if its first argument is called
            `named_parameters`, of (name, parameter) pairs.
        lr_scheduler_factory: makes the scheduler of the optimizer.
        optimizer_groups: `{pattern: options}`, or pairs of them: the first pattern found in a parameter's name gives
            it its options, such as `lr`; parameter groups; or a function of (name, parameter) pairs that returns these.
        fused_loss_factory: makes, of the model's output embeddings, a function of (hidden_states, labels) that is the
            loss; logits are then computed for `compute_metrics` and `predict` only.
        enable_activation_checkpoint_fn: called with the rank and the model in place of the model's own method, if
            `gradient_checkpointing` is set.
        distributed_env: an object with `rank`, `world_size`, `local_rank`, `master_addr` and `master_port`, for
            processes that torchrun has not started.
        data_collator: makes a batch of a list of samples; None for `transformers`' default, or padding where there
            is a tokenizer.
        train_dataset: what is trained on, map-style or iterable; None for a Trainer that only evaluates or
            predicts.
        processing_class: the tokenizer or processor, saved beside the weights and used to pad.
        model_init: creates a new model for every `train()`, without arguments or from a trial.
        compute_loss_func: the loss, from (outputs, labels, num_items_in_batch); a 0-d tensor, the mean or, with
            `num_items_in_batch`, the sum divided by it.
        compute_metrics: the metrics of an evaluation by name, as floats, from an `EvalPrediction` of arrays over
            all samples.
        optimizer_cls_and_kwargs: the class of the optimizer and its keywords, in place of `args.optim`.
        preprocess_logits_for_metrics: called with (logits, labels) on the device; what it returns is gathered for
            `compute_metrics`.

    Raises:
        ConfigError: for incompatible arguments.
    """

    @errors_name_arguments
    def train(
        self, resume_from_checkpoint: Resume = None, trial: object = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Train as `args` specify. Collective; may be called again to continue training from the model's weights.

        Args:
            resume_from_checkpoint: the checkpoint to continue from: its directory, True for the newest in
                `output_dir`, False for a new run; None continues an interrupted run of this `output_dir`, if there is
                one.
            trial: the trial of a hyperparameter search; None outside of one.
            ignore_keys_for_eval: the keys of the model's outputs that evaluations during training do not gather.

        Raises:
            ConfigError: before anything is built.
            DataError: for a dataset that cannot be trained on.
            RunExistsError: if a live process works on `output_dir`.
            NonFiniteError: if a loss or gradient norm is NaN or infinite.
        """
        check_overrides(self)
        if not hasattr(self, "callback_manager"):
            name = type(self).__name__
            raise ConfigError(f"{name}.__init__ does not call super().__init__(...); call it before it returns.")
        if (takeover := current_takeover()) is not None:
            takeover.train(self)
        if not self.args.auto_find_batch_size:
            return self._train_once(resume_from_checkpoint, trial, ignore_keys_for_eval)
        resume = resume_from_checkpoint
        return with_largest_batch(
            self,
            lambda is_first: self._train_once(resume if is_first or resume else False, trial, ignore_keys_for_eval),
            unfinished_batch_size(self, resume),
        )

    @errors_name_arguments
    def hyperparameter_search(
        self,
        /,
        hp_space: HPSpace | None = None,
        compute_objective: Callable[[Metrics], Any] | None = None,
        n_trials: int = 20,
        direction: str | Sequence[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Train `n_trials` models from `model_init`, each with other arguments, and return the best trial. Collective.

        Each trial is a run in a directory of its own, `run-<number>` in `output_dir`. The same call in a new process
        continues an interrupted search: trials that have ended are not trained again, and one that was interrupted
        continues from the newest checkpoint of its run. Afterwards `args` are as before.

        Args:
            hp_space: gives the arguments of a trial by name, from an `optuna.Trial`; with Ray their spaces, such as
                `ray.tune.uniform(0, 1)`. None searches the learning rate, the number of epochs, the seed and
                the batch size.
            compute_objective: the objective, from the metrics of an evaluation; a list if there are several directions.
                None is the sum of the metrics other than the loss, or the loss if there are none.
            n_trials: trials of the whole search, those of earlier processes included.
            direction: `minimize` or `maximize`, or one of them for each value of the objective.
            backend: `optuna` or `ray`, with which Ray starts a process for each trial; None is the one that is
                installed, and Optuna if both are.
            hp_name: the name of a trial's directory, from the trial; with Ray from its parameters.
            **kwargs: those of `optuna.create_study`, `timeout` (seconds), `catch` and `gc_after_trial`; with Ray those
                of `ray.tune.run`, such as `scheduler`, `search_alg` and `resources_per_trial`.

        Returns:
            The best trial; with several directions, a list of those that no other trial surpasses in all of them. With
            Ray, its `run_summary` is Ray's `ExperimentAnalysis`.

        Raises:
            ConfigError: before any trial, for a search that cannot be made.
            OnstepError: with Ray, if trials have failed.
        """
        return search(self, hp_space, compute_objective, n_trials, direction, backend, hp_name, kwargs)

    def rewind(
        self,
        step: int,
        *,
        run: str | os.PathLike[str] | None = None,
        callbacks: Sequence[object] = (),
        log: Sequence[str] = (),
    ) -> AbstractContextManager[Past]:
        """Repeat a run of this Trainer in memory to a step, as `onstep.rewind`, and hold it there. Collective.

        Nothing is written to the run's directory. Its own callbacks are called again. After the block, the Trainer and
        the weights of its model are as before.

        Args:
            step: the step to hold at, right before its update; it counts from 1.
            run: the directory of the run; None for `args.output_dir`.
            callbacks: called beside the Trainer's own.
            log: metrics that `past.log` has of each repeated step.

        Raises:
            ConfigError: if there is no such step, or the run trained another model.
            DataError: if the run was trained on other data.
        """
        directory = Path(local_output_dir(self.args) if run is None else run)
        return rewound(self, directory, step, callbacks=callbacks, log=log)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Make the optimizer and the schedule, train, and finish. Collective; an override calls `super()`.

        Args:
            batch_size: samples of a micro-batch; like `args` and `ignore_keys_for_eval` it cannot be changed here.
            resume_from_checkpoint: the checkpoint that the run continues from; None for a new one.

        Raises:
            ConfigError: if it is not `train` that calls it.
        """
        session, started = self.session, time.time()
        if session is None or session.build is None or session.optimizer is not None:
            raise ConfigError("Trainer._inner_training_loop is called by train(), once for a training; call train().")
        if self.args.auto_find_batch_size:
            self._update_auto_batch_size(self._train_batch_size if batch_size is None else batch_size)
        run_job(job_of(self, session))
        return self._finalize_training(trial, session.state.info.num_train_samples, started)

    def _finalize_training(self, trial: object, num_train_samples: int, start_time: float) -> TrainOutput:
        """Load the best weights if asked, and write the final ones. Collective; the last record is written already.

        Raises:
            ConfigError: if no training has just ended.
        """
        if self.session is None or not self.session.trains:
            raise ConfigError("Trainer._finalize_training is called at the end of a training; call train().")
        state = self.session.state
        if not overrides(self, "_load_best_model") and not overrides(self, "_issue_warnings_after_load"):
            load_best_model(state, self.session.model)
        elif self.args.load_best_model_at_end and state.train_state.best_model_checkpoint and not state.exits.decided:
            self._load_best_model()
        written: list[Path] = []

        def write(directory: RunDir) -> None:
            write_final_files(self, directory)
            written.append(directory.model)

        write_final_weights(state, write, self.model, by_all=self.stages is not None)
        if self.args.push_to_hub:
            for directory in written:
                self.push_final(directory)
            self.finish_pushes(state.world)
        else:
            self._finish_current_push()
        return _train_output(state)

    def _train_once(
        self, resume_from_checkpoint: Resume, trial: object, ignore_keys_for_eval: list[str] | None
    ) -> TrainOutput:
        self._hp_search_setup(trial)
        check_training(self, resume_from_checkpoint)
        self.check_evaluation()
        if self.model_init is not None:
            self.model = None
        with training_session(self, resume_from_checkpoint, ignore_keys_for_eval) as session:
            if trial is not None:
                session.state.trainer_state.is_hyper_param_search = True
                note_trial(session.state.trainer_state, trial, self.hp_name)
            checkpoints = session.state.checkpoints
            start = None if checkpoints is None else checkpoints.start
            check_output_dir(self, checkpoints, trial)
            load_weights_first(self, checkpoints)
            return self._inner_training_loop(
                batch_size=self._train_batch_size,
                args=self.args,
                resume_from_checkpoint=None if start is None else str(start.path),
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )

    def _evaluation(self) -> AbstractContextManager[Session]:
        return evaluation_session(self)


def _train_output(state: GlobalState) -> TrainOutput:
    return TrainOutput(state.train_state.step, state.mean_loss(), dict(state.info.history.final_metrics or {}))
