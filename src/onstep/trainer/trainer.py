"""`Trainer`: Hugging Face's constructor and methods over the one training loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.checks import check_training
from onstep.trainer.evaluating import EvaluationJob
from onstep.trainer.outputs import PredictionOutput, TrainOutput
from onstep.trainer.saving import save_model
from onstep.trainer.session import Session, evaluation_session, training_session
from onstep.training.best_metric import note_best_metric
from onstep.training.bridge.global_state import GlobalState
from onstep.training.final_weights import write_final_weights
from onstep.training.log_step import publish
from onstep.training.pretrain import load_best_model
from onstep.training.train import train


class Trainer(BaseTrainer):
    """Trains any `nn.Module` on any map-style or iterable dataset, or a `transformers` model as it comes.

    The arguments are those of `transformers.Trainer`. Batches are mappings, handed to the model as keywords, or tuples,
    handed over by position; with `compute_loss_func(outputs, labels)` the last element of a tuple is the labels.

    Args:
        model: the module to train; or `model_init`, which makes a new one for every `train()`.
        args: `onstep.TrainingArguments`, or an instance of Hugging Face's.
        eval_dataset: one dataset, or a dict of them by name.
        callbacks: added after the defaults (DefaultMetrics, ProgressCallback, InfoCallback); an instance of a default's
            class replaces it. A `CallbackManager` is taken as it is, and completed.
        optimizers: an optimizer and a scheduler, or factories: a callable that makes an optimizer from parameters, one
            that makes a scheduler from an optimizer.
        default_callbacks: False leaves the defaults out.

    Raises:
        ConfigError: arguments that do not go together.
    """

    @property
    def state(self) -> Any:
        """Hugging Face's view of the progress; None before the first run."""
        return None if self.global_state is None else self.global_state.trainer_state

    @property
    def control(self) -> Any:
        """Where to ask the running loop for something; None before the first run."""
        return None if self.global_state is None else self.global_state.control

    def add_callback(self, callback: Any) -> None:
        """Register a callback, or a class of one."""
        self.callback_manager.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove the first callback that is this instance, or exactly of this class; returns it, or None."""
        try:
            return self.callback_manager.remove(callback)
        except ValueError:
            return None

    def remove_callback(self, callback: Any) -> None:
        """Remove the first callback that is this instance, or exactly of this class; nothing happens if none is."""
        self.pop_callback(callback)

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Train as `args` say. Collective; may be called again, which trains on from the model's weights.

        Raises:
            ConfigError: before anything is built.
            DataError: for a dataset that cannot be trained on.
            RunExistsError: when `output_dir` holds another run.
            NonFiniteError: when a loss or gradient norm is NaN or infinite.
        """
        check_training(self, resume_from_checkpoint)
        if self.model_init is not None:
            self.model = None
        with training_session(self, resume_from_checkpoint) as session:

            def evaluation() -> None:
                if self.eval_dataset is not None and session.state.cfg.validation.eval_iters != 0:
                    metrics = self._evaluate_all(session, self.eval_dataset, ignore_keys_for_eval, "eval")
                    note_best_metric(session.state, metrics)

            train(
                session.forward_step,
                session.model,
                session.optimizer,
                session.scheduler,
                session.train_data,
                None,
                session.state,
                callback_manager=self.callback_manager,
                evaluation=evaluation,
            )
            load_best_model(session.state, session.model)
            write_final_weights(
                session.state, lambda folder: save_model(session.module, folder.model, self.processing_class)
            )
            return _train_output(session.state)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Metrics of a dataset, or of each in a dict of them under `<prefix>_<name>`. Collective.

        A callback may call it while training. `eval_dataset` may be a name in the dict that the constructor was given.
        """
        dataset = self.eval_dataset if eval_dataset is None else self._named(eval_dataset)
        if dataset is None:
            raise ConfigError("Trainer.evaluate needs an eval_dataset; pass one here or to the constructor.")
        if isinstance(eval_dataset, str):
            metric_key_prefix = f"{metric_key_prefix}_{eval_dataset}"
        with evaluation_session(self) as session:
            return self._evaluate_all(session, dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions, labels and metrics of a whole dataset, in its order. Collective.

        A set without labels has no loss and no `compute_metrics`. With `prediction_loss_only` only the loss is there.
        """
        with evaluation_session(self) as session:
            return EvaluationJob(self, session, metric_key_prefix, ignore_keys, is_test=True).run(test_dataset)

    def log(self, logs: dict[str, Any]) -> None:
        """Add a record of your own to the log, for example from `compute_loss`: callbacks are told `on_log`.

        Raises:
            ConfigError: outside of a run.
        """
        if self.session is None:
            raise ConfigError("Trainer.log needs a run: call it while training or evaluating.")
        state: GlobalState = self.session.state
        publish(state, {"epoch": state.trainer_state.epoch, **logs}, self.session.tell)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the weights, and the processing class, to `output_dir` (default: `args.output_dir`), on rank 0.

        Raises:
            ConfigError: when `model_init` has not made a model yet.
        """
        if self.model is None:
            raise ConfigError("There is no model to save yet: model_init runs when training starts.")
        if self.global_state is None or self.global_state.world.is_main:
            save_model(self.model, Path(output_dir or str(self.args.output_dir)), self.processing_class)

    def _evaluate_all(
        self, session: Session, dataset: Any, ignore_keys: list[str] | None, prefix: str
    ) -> dict[str, Any]:
        if isinstance(dataset, Mapping):
            metrics: dict[str, Any] = {}
            for name, one in dataset.items():
                metrics |= self._evaluate_all(session, one, ignore_keys, f"{prefix}_{name}")
            return metrics
        return EvaluationJob(self, session, prefix, ignore_keys).run(dataset).metrics

    def _named(self, eval_dataset: Any) -> Any:
        if not isinstance(eval_dataset, str):
            return eval_dataset
        known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
        if eval_dataset not in known:
            names = ", ".join(known) or "the constructor was given no dict of them"
            raise ConfigError(f"eval_dataset={eval_dataset!r} is no name of an evaluation set; known: {names}.")
        return known[eval_dataset]


def _train_output(state: GlobalState) -> TrainOutput:
    records = reversed(state.facts.log_history)
    final: dict[str, Any] = next((record for record in records if "train_runtime" in record), {})
    loss = state.mean_loss()
    return TrainOutput(state.train_state.step, loss, {**final, "train_loss": loss})
