"""`Trainer`: Hugging Face's constructor and methods on top of the training loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from onstep.errors import ConfigError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.dataloaders import eval_loader
from onstep.trainer.loss_convention import inner_module
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.output_dir.files import write_final_files
from onstep.trainer.overrides import check_overrides
from onstep.trainer.predictions import Collected, EvalPrediction, PredictionCollector, PredictionOutput, TrainOutput
from onstep.trainer.session import Session, check_training, evaluation_session, training_session
from onstep.training.bridge.global_state import GlobalState
from onstep.training.pretrain import load_best_model
from onstep.training.setup.final_weights import write_final_weights
from onstep.training.stages.evaluation import evaluate, note_best_metric, write_evaluation
from onstep.training.train import train

logger = logging.getLogger(__name__)


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
        default_callbacks: False disables the defaults.

    Raises:
        ConfigError: for incompatible arguments; for a subclass that overrides a method of Hugging Face's Trainer which
            is never called here.
    """

    @property
    def state(self) -> Any:
        """Hugging Face's view of the progress; None before the first run."""
        return None if self.global_state is None else self.global_state.trainer_state

    @property
    def control(self) -> Any:
        """Accepts requests to the running loop; None before the first run."""
        return None if self.global_state is None else self.global_state.control

    def add_callback(self, callback: Any) -> None:
        """Register a callback, or a callback class."""
        self.callback_manager.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove the first callback that is this instance, or exactly of this class; returns it, or None."""
        try:
            return self.callback_manager.remove(callback)
        except ValueError:
            return None

    def remove_callback(self, callback: Any) -> None:
        """Remove the first callback that is this instance, or exactly of this class; does nothing without a match."""
        self.pop_callback(callback)

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Train as `args` specify. Collective; may be called again to continue training from the model's weights.

        Raises:
            ConfigError: before anything is built.
            DataError: for a dataset that cannot be trained on.
            RunExistsError: if `output_dir` holds another run.
            NonFiniteError: if a loss or gradient norm is NaN or infinite.
        """
        check_overrides(type(self), vars(self))
        check_training(self, resume_from_checkpoint)
        if self.model_init is not None:
            self.model = None
        with training_session(self, resume_from_checkpoint) as session:

            def evaluation() -> None:
                if self.eval_dataset is not None and session.state.cfg.validation.eval_iters != 0:
                    metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
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
            write_final_weights(session.state, partial(write_final_files, self))
            return _train_output(session.state)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Compute the metrics of a dataset, or of each in a dict of them under `<prefix>_<name>`. Collective.

        A callback may call it during training. `eval_dataset` may be a key of the dict passed to the constructor.
        """
        dataset = self.eval_dataset if eval_dataset is None else self._named(eval_dataset)
        if dataset is None:
            raise ConfigError("Trainer.evaluate requires an eval_dataset; pass one here or to the constructor.")
        if isinstance(eval_dataset, str):
            metric_key_prefix = f"{metric_key_prefix}_{eval_dataset}"
        with evaluation_session(self) as session:
            return self._evaluate_all(session, dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions, labels and metrics of a whole dataset, in its order. Collective.

        A set without labels has no loss, and `compute_metrics` is not called. `prediction_loss_only` returns only the
        loss.
        """
        with evaluation_session(self) as session:
            return _evaluate_dataset(self, session, test_dataset, metric_key_prefix, ignore_keys, is_test=True)

    def _evaluate_all(
        self, session: Session, dataset: Any, ignore_keys: list[str] | None, prefix: str
    ) -> dict[str, Any]:
        if isinstance(dataset, Mapping):
            metrics: dict[str, Any] = {}
            for name, one in dataset.items():
                metrics |= self._evaluate_all(session, one, ignore_keys, f"{prefix}_{name}")
            return metrics
        return _evaluate_dataset(self, session, dataset, prefix, ignore_keys).metrics

    def _named(self, eval_dataset: Any) -> Any:
        if not isinstance(eval_dataset, str):
            return eval_dataset
        known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
        if eval_dataset not in known:
            names = ", ".join(known) or "the constructor was not passed a dict of them"
            raise ConfigError(f"eval_dataset={eval_dataset!r} is not the name of an evaluation set; known: {names}.")
        return known[eval_dataset]


def _train_output(state: GlobalState) -> TrainOutput:
    loss = state.mean_loss()
    return TrainOutput(state.train_state.step, loss, {**(state.info.history.final_metrics or {}), "train_loss": loss})


def _evaluate_dataset(
    trainer: BaseTrainer,
    session: Session,
    dataset: Any,
    prefix: str,
    ignore_keys: list[str] | None = None,
    *,
    is_test: bool = False,
) -> PredictionOutput:
    """Evaluate a dataset with the loop's `evaluate`, and collect predictions if needed. Collective.

    `ignore_keys` are outputs of the model that are not predictions; a test reads the whole set, possibly without
    labels.
    """
    state, step = session.state, session.forward_step
    collector = _collector(trainer, session, ignore_keys or [], is_test)
    collected = Collected()

    def computed_metrics() -> dict[str, Any]:
        nonlocal collected
        if collector is None:
            return {}
        collected = collector.gather(state.world)
        return _computed_metrics(trainer, collected, f"{prefix}_")

    before = state.entry_point.eval_dataloader, step.collector
    loader = eval_loader(dataset, session.collate, state.cfg, state.world, is_test=is_test)
    state.entry_point.eval_dataloader, step.collector = loader, collector
    try:
        means, _, _ = evaluate(
            state,
            step,
            loader,
            session.model,
            None,
            state.cfg.model,
            is_test=is_test,
            notify=session.notify,
            metric_key_prefix=prefix,
            extra_metrics=computed_metrics,
        )
    finally:
        state.entry_point.eval_dataloader, step.collector = before
    if means and state.bridge_trackers.recipients:
        # the name of the set in trackers with Megatron Bridge's tags: `validation`, or `validation <name>` of several
        kind, own = ("test", "test") if is_test else ("validation", "eval")
        with state.bridge_trackers.held(lambda: state.ending.ended):
            write_evaluation(state, means, f"{kind} {prefix.removeprefix(own).removeprefix('_')}".rstrip())
    return PredictionOutput(collected.predictions, collected.label_ids, state.evaluated.last_metrics)


def _collector(
    trainer: BaseTrainer, session: Session, ignore_keys: list[str], is_test: bool
) -> PredictionCollector | None:
    if trainer.args.prediction_loss_only or not (is_test or trainer.compute_metrics is not None):
        return None
    # outputs, such as a key/value cache, that a `transformers` model declares not to be predictions
    config: Any = getattr(inner_module(session.module), "config", None)
    no_predictions = getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"]
    keeps_inputs = "inputs" in trainer.args.include_for_metrics
    return PredictionCollector(
        session.labels,
        [*ignore_keys, *no_predictions],
        trainer.preprocess_logits_for_metrics,
        getattr(session.module, "main_input_name", "input_ids") if keeps_inputs else None,
        is_test,
    )


def _computed_metrics(trainer: BaseTrainer, collected: Collected, prefix: str) -> dict[str, Any]:
    predictions, label_ids, inputs, losses = collected
    if trainer.compute_metrics is None or predictions is None:
        return {}
    if label_ids is None:
        logger.warning("compute_metrics is not called: the evaluated samples have no labels; set label_names")
        return {}
    wanted_losses = losses if "loss" in trainer.args.include_for_metrics else None
    metrics = trainer.compute_metrics(EvalPrediction(predictions, label_ids, inputs, wanted_losses))
    return {key if key.startswith(prefix) else prefix + key: _plain(value) for key, value in metrics.items()}


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
