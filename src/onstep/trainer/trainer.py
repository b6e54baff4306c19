"""`Trainer`: Hugging Face's constructor and methods over the one training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from onstep.callbacks import DefaultMetrics, InfoCallback, ProgressCallback
from onstep.config import TrainingArguments
from onstep.errors import ConfigError
from onstep.events import CallbackManager
from onstep.trainer.evaluating import EvaluationJob
from onstep.trainer.loss_convention import accepts_num_items
from onstep.trainer.model_step import default_compute_loss
from onstep.trainer.outputs import EvalPrediction, PredictionOutput, TrainOutput
from onstep.trainer.preparation import Preparation, prepare
from onstep.trainer.saving import save_model
from onstep.training.scope import RunScope
from onstep.training.state import GlobalState
from onstep.training.train import train

logger = logging.getLogger(__name__)

Collate = Callable[[Sequence[Any]], Any]


class Trainer:
    """Trains any `nn.Module` on any map-style or iterable dataset, or a `transformers` model as it comes.

    The arguments are those of `transformers.Trainer`. `optimizers` takes objects or factories: a callable that makes an
    optimizer from parameters, one that makes a scheduler from an optimizer. Batches are mappings (handed to the model
    as keywords) or tuples (the last element is the labels).

    Args:
        callbacks: added after the defaults (DefaultMetrics, ProgressCallback, InfoCallback); an instance of a default's
            class replaces it.
        default_callbacks: False leaves the defaults out.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        data_collator: Collate | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[Any] | CallbackManager | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        default_callbacks: bool = True,
    ) -> None:
        if (model is None) == (model_init is None):
            raise ConfigError("Trainer needs exactly one of model and model_init; pass the other as None.")
        if optimizer_cls_and_kwargs is not None and optimizers[0] is not None:
            raise ConfigError("Pass the optimizer through optimizers or optimizer_cls_and_kwargs, not both.")
        self.args = args if args is not None else TrainingArguments()
        self.model = model
        self.model_init = model_init
        self.data_collator = data_collator
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.global_state: GlobalState | None = None
        """State of the run that ran last, or runs now."""
        self.active_run: Preparation | None = None
        self.owned_folder: Path | None = None
        """The run folder that this Trainer took; it may train into it again."""
        self.callback_manager = _with_defaults(callbacks, default_callbacks, bool(self.args.disable_tqdm))
        self._loss_func_takes_items = compute_loss_func is not None and accepts_num_items(compute_loss_func)

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

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a micro-batch, and the outputs where asked for; override it for a loss of your own.

        An override that uses `num_items_in_batch` (the labels of the whole step over all ranks) returns its share
        of the step's loss; one that does not returns a mean, weighted by the micro-batch's labels or samples.
        """
        takes_items = self._loss_func_takes_items or self.compute_loss_func is None
        loss, outputs = default_compute_loss(
            model,
            inputs,
            compute_loss_func=self.compute_loss_func,
            passes_num_items=takes_items,
            num_items_in_batch=num_items_in_batch,
        )
        return (loss, outputs) if return_outputs else loss

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Train as `args` say. Collective; may be called again, which trains on from the model's weights.

        Raises:
            ConfigError: before anything is built.
            NonFiniteError: when a loss or gradient norm is NaN or infinite.
        """
        if self.train_dataset is None:
            raise ConfigError("Trainer.train needs a train_dataset; pass one to the constructor.")
        if resume_from_checkpoint not in (None, True, False):
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: this version writes no checkpoints to resume from."
            )
        if self.model_init is not None:
            self.model = None
        with prepare(self, for_training=True) as run:
            return self._train(run, ignore_keys_for_eval or [])

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, Any]:
        """Metrics of a dataset, or of each in a dict of them under `<prefix>_<name>`. Collective."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if dataset is None:
            raise ConfigError("Trainer.evaluate needs an eval_dataset; pass one here or to the constructor.")
        with prepare(self, for_training=False) as run, RunScope(run.tell):
            return self._evaluate_all(run, dataset, ignore_keys or [], metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions, labels and metrics of a dataset, in its order. Collective."""
        with prepare(self, for_training=False) as run, RunScope(run.tell):
            job = EvaluationJob(self, run, ignore_keys or [], metric_key_prefix, is_test=True, keeps_predictions=True)
            job.run(test_dataset)
            return PredictionOutput(job.predictions, job.label_ids, job.metrics)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the weights, and the processing class, to `output_dir` (default: `args.output_dir`), on rank 0."""
        model = self.model
        if model is None:
            raise ConfigError("There is no model to save yet: model_init runs when training starts.")
        rank = 0 if self.global_state is None else self.global_state.world.rank
        if rank == 0:
            save_model(model, Path(output_dir or str(self.args.output_dir)), self.processing_class)

    def _train(self, run: Preparation, ignore_keys: list[str]) -> TrainOutput:
        state = run.state
        with RunScope(run.tell):
            run.tell("on_init_end")

            def evaluation() -> None:
                if self.eval_dataset is not None:
                    metrics = self._evaluate_all(run, self.eval_dataset, ignore_keys, "eval")
                    run.note_metrics(metrics)

            train(
                run.forward_step,
                run.model,
                run.optimizer,
                run.scheduler,
                run.train_data,
                None,
                state,
                callback_manager=self.callback_manager,
                evaluation=evaluation,
            )
            if run.saves_weights and not state.control.should_abort_without_save and state.world.is_main:
                save_model(run.module, state.run_folder.model, self.processing_class)
        final = state.facts.log_history[-1] if state.facts.log_history else {}
        return TrainOutput(state.train_state.step, run.mean_loss(), dict(final))

    def _evaluate_all(self, run: Preparation, dataset: Any, ignore_keys: list[str], prefix: str) -> dict[str, Any]:
        if isinstance(dataset, Mapping):
            metrics: dict[str, Any] = {}
            for name, one in dataset.items():
                metrics |= self._evaluate_all(run, one, ignore_keys, f"{prefix}_{name}")
            return metrics
        keeps = self.compute_metrics is not None and not self.args.prediction_loss_only
        job = EvaluationJob(self, run, ignore_keys, prefix, is_test=False, keeps_predictions=keeps)
        job.run(dataset)
        return job.metrics


def _with_defaults(callbacks: Any, wanted: bool, disable_tqdm: bool) -> CallbackManager:
    """The defaults first, then the user's; an instance of a default's class replaces it."""
    if isinstance(callbacks, CallbackManager):
        given = callbacks
    else:
        given = CallbackManager()
        given.add(callbacks or [])
    if not wanted:
        return given
    progress = ProgressCallback(use_tqdm=False) if disable_tqdm else ProgressCallback()
    first = given.callbacks[0] if given.callbacks else None
    for default in (DefaultMetrics(), progress, InfoCallback()):
        if not any(isinstance(one, type(default)) for one in given.callbacks):
            given.add(default, before=first)
    return given
