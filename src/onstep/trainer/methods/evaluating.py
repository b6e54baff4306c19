"""Hugging Face's methods of an evaluation: of one dataset, of one loop over batches, of one batch."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from onstep.checkpoint import RngState
from onstep.data import Batch
from onstep.data.loaders.collate import length_of
from onstep.errors import ConfigError, warn_once
from onstep.record.kinds import Metrics
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.call import Session
from onstep.trainer.computed_metrics import (
    batch_metrics,
    call_named,
    check_batch_metrics,
    computed_metrics,
    prefixed,
)
from onstep.trainer.computing.random_numbers import draw_for_evaluation
from onstep.trainer.dataloaders import as_eval_loader, check_eval_data, eval_loader_of
from onstep.trainer.full_eval import cast_weights
from onstep.trainer.loss_convention import inner_module
from onstep.trainer.model_step import call_model, find_loss
from onstep.trainer.optimizer_checks import check_metrics
from onstep.trainer.optimizers import step_on_metric
from onstep.trainer.overrides import overrides
from onstep.trainer.predictions import (
    Collected,
    EvalLoopOutput,
    PredictionOutput,
    collector_for,
    logits_of,
    mean_of,
)
from onstep.trainer.reporting.argument_errors import errors_name_arguments
from onstep.training.compute.step import to_device
from onstep.training.stages.best_metric import note_best_metric, save_best
from onstep.training.stages.evaluation import evaluation_mode, record_evaluation, score, until_interrupted
from onstep.training.stages.evaluation_report import write_evaluation
from onstep.training.stages.record import keep, record

logger = logging.getLogger(__name__)


class EvaluatingMethods(BaseTrainer):
    """Hugging Face's methods of an evaluation."""

    _trial: object
    _report_to_hp_search: Callable[..., None]
    _gather_function: Callable[..., object] | None = None
    model_preparation_time: float | None = None
    """Seconds in which the model was placed for the first evaluation; None if a training placed it."""

    @property
    def gather_function(self) -> Callable[..., object]:
        """For an overridden `evaluation_loop`: gathers the tensors of all ranks, without those of fillers. Collective.

        It may be assigned; Onstep's own loop gathers at its end, and does not call it.
        """
        return self._gather_function or self.accelerator.gather_for_metrics  # type: ignore[attr-defined]

    @gather_function.setter
    def gather_function(self, function: Callable[..., object]) -> None:
        self._gather_function = function

    @property
    def is_in_train(self) -> bool:
        """Whether `train()` is running."""
        return self.session is not None and self.session.trains

    @errors_name_arguments
    def evaluate(
        self, eval_dataset: object = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> Metrics:
        """Compute the metrics of a dataset, or of each in a dict of them under `<prefix>_<name>`. Collective.

        A callback may call it during training. `eval_dataset` may be a key of the dict passed to the constructor.

        Args:
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
            metric_key_prefix: what the names of the metrics begin with, before an underscore.
        """
        dataset = self.eval_dataset if eval_dataset is None else self._named(eval_dataset)
        if dataset is None and not overrides(self, "get_eval_dataloader"):
            raise ConfigError("Trainer.evaluate requires an eval_dataset; pass one here or to the constructor.")
        if not overrides(self, "get_eval_dataloader"):
            check_eval_data(dataset)
        if isinstance(eval_dataset, str):
            metric_key_prefix = f"{metric_key_prefix}_{eval_dataset}"
        with self._evaluation() as session:
            if not isinstance(dataset, Mapping):
                with self.memory.measured("eval") as memory:
                    metrics = self._evaluate_one(session, dataset, ignore_keys, metric_key_prefix).metrics
                return {**metrics, **memory}
            metrics = {}
            for name, one in dataset.items():
                prefix = f"{metric_key_prefix}_{name}"
                metrics |= self.evaluate(eval_dataset=one, ignore_keys=ignore_keys, metric_key_prefix=prefix)
            return metrics

    @errors_name_arguments
    def predict(
        self, test_dataset: object, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predictions, labels and metrics of a whole dataset, in its order. Collective.

        A set without labels has no loss, and `compute_metrics` is not called. `prediction_loss_only` returns only the
        loss.

        Args:
            test_dataset: the samples to predict, as the model's inputs; labels may be absent.
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
            metric_key_prefix: what the names of the metrics begin with, before an underscore.
        """
        with self.memory.measured("test") as memory, self._evaluation() as session:
            output = self._evaluate_one(session, test_dataset, ignore_keys, metric_key_prefix, is_test=True)
        return PredictionOutput(output.predictions, output.label_ids, {**output.metrics, **memory})

    def evaluation_loop(
        self,
        dataloader: object,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the model over the batches of a loader; the metrics are returned, and nothing is logged. Collective.

        Args:
            dataloader: of `get_eval_dataloader`, or any iterable of batches of this rank, with at least one for each;
                the evaluation continues until the longest ends. An overridden `get_eval_dataloader` may return an empty
                one, as that of sentence-transformers does for an evaluator alone.
            description: "Prediction" for data that may have no labels; such data is read completely.
            prediction_loss_only: keep no predictions; None is `args.prediction_loss_only`.
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
            metric_key_prefix: what the names of the metrics begin with, before an underscore.
        """
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        is_test = description == "Prediction"
        if overrides(self, "get_eval_dataloader") and length_of(dataloader) == 0:
            return EvalLoopOutput(None, None, {}, 0)
        with self._evaluation() as session:
            state, step = session.state, session.forward_step
            loader = as_eval_loader(self, dataloader, state.cfg, state.world, is_test=is_test)
            collector = None if loss_only else collector_for(self.args, session.module, is_test=is_test)
            batches = None if loss_only else batch_metrics(self.compute_metrics, self.args, state.world)

            def predict(model: nn.Module, inputs: Batch) -> Tensor | None:
                loss, logits, labels = self.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
                loss = mean_of(loss)
                if self.preprocess_logits_for_metrics is not None and logits is not None:
                    logits = call_named(self.preprocess_logits_for_metrics, logits, labels)
                for keeper in (collector, batches):
                    if keeper is not None:
                        keeper.add(inputs, logits, labels, loss, step.is_filler)
                return loss

            is_asked = not loss_only or overrides(self, "prediction_step")
            before = step.predict, session.is_test
            # it stays what callbacks get as eval_dataloader, as in Hugging Face's Trainer
            state.entry_point.eval_dataloader, session.is_test = dataloader, is_test
            step.predict = predict if is_asked else None
            try:
                draw_for_evaluation(loader)
                with evaluation_mode(session.model), ExitStack() as casts:
                    for part in session.parts:
                        casts.enter_context(cast_weights(part, self._full_dtype()))
                    means, metrics, num_samples = score(
                        state,
                        step,
                        loader,
                        session.model,
                        session.notify,
                        is_test=is_test,
                        prefix=metric_key_prefix,
                    )
            finally:
                step.predict, session.is_test = before
            collected = Collected() if collector is None else collector.gather(state.world)
            if batches is None:
                preprocess = self.preprocess_logits_for_metrics
                computed = computed_metrics(
                    self.compute_metrics, collected, self.args, are_preprocessed=preprocess is not None
                )
            else:
                computed = batches.result()
                if state.world.sizes.pp > 1:  # only the last stage has outputs
                    computed = next((one for one in state.world.gather(computed) if one), {})
            metrics |= prefixed(computed, metric_key_prefix, measured=metrics)
            if self._preparation_time(session) is not None:
                metrics[f"{metric_key_prefix}_model_preparation_time"] = self.model_preparation_time
            session.means = means
            self._write_to_trackers(session, metric_key_prefix, is_test)
        return EvalLoopOutput(collected.predictions, collected.label_ids, metrics, num_samples)

    def prediction_loop(
        self,
        dataloader: object,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """`evaluation_loop` under its name in transformers 4; called if `args.use_legacy_prediction_loop` is set.

        Args:
            prediction_loss_only: whether only the loss is returned, without outputs and labels.
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
            metric_key_prefix: what the names of the metrics begin with, before an underscore.
            dataloader: the batches to predict.
            description: the name of the loop in messages, such as "Evaluation".
        """
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, object, object]:
        """The loss, logits and labels of one batch; None for those that it lacks or that are not asked for.

        Args:
            model: the module in eval mode.
            inputs: one micro-batch as the collator returned it, a mapping or a tuple; it is moved to the device here.
            prediction_loss_only: whether only the loss is returned, without outputs and labels.
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
        """
        with self._evaluation() as session, torch.no_grad(), session.state.autocast(), ExitStack() as stack:
            inputs = self._placed(inputs)
            parallel, inputs = self._prepare_context_parallel_inputs(model, inputs)
            stack.enter_context(parallel())
            labels = session.labels.of(inputs)
            computes = not session.is_test and self._computes_own_loss()
            if labels is None and not computes and not self._gives_loss_without_labels(inputs):  # type: ignore[attr-defined]
                outputs = call_model(model, inputs)
                loss = find_loss(outputs)
            else:
                loss, outputs = session.forward_step.loss_and_outputs(model, inputs)
        if prediction_loss_only:
            return loss, None, None
        # outputs, such as a key/value cache, that a `transformers` model declares not to be predictions
        config = getattr(inner_module(model), "config", None)
        no_predictions = getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"]
        return (
            loss,
            logits_of(outputs, {"loss", *(ignore_keys or ()), *no_predictions}, has_loss=loss is not None),
            labels,
        )

    def _evaluate(self, trial: object, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False) -> Metrics:
        """The evaluation of a run, when one is due."""
        metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
        state = self.session.state
        state.evaluated.at_step = state.train_state.step
        self._report_to_hp_search(trial, state.train_state.step, metrics)
        if not skip_scheduler:
            step_on_metric(self, self.session.scheduler, metrics)
        return metrics

    def _determine_best_metric(self, metrics: Metrics, trial: object) -> bool:
        """Remember the value of `metric_for_best_model` if it is the best so far; returns whether it is.

        Raises:
            ConfigError: if `metrics` lacks it.
        """
        return note_best_metric(self.global_state or self.session.state, metrics)

    def check_evaluation(self) -> None:
        """Refuse (ConfigError) metrics and overridden methods that an evaluation would not call as they are meant."""
        compute = self.compute_metrics
        if self.args.batch_eval_metrics and compute is not None:
            check_batch_metrics(compute)
        others = ("evaluate", "evaluation_loop")
        is_idle = not self.args.use_legacy_prediction_loop and not any(overrides(self, name) for name in others)
        if is_idle and overrides(self, "prediction_loop"):
            raise ConfigError(
                f"{type(self).__name__} overrides prediction_loop, which transformers 5 never calls, and 4 only on "
                f"request; override evaluation_loop instead, or set args.use_legacy_prediction_loop = True."
            )

    def evaluate_in_run(self, ignore_keys: list[str] | None) -> None:
        """The evaluation of a run, and what follows from its metrics. Collective.

        Args:
            ignore_keys: the keys of the model's outputs that are not gathered; None for
                `model.config.keys_to_ignore_at_inference`.
        """
        state = self.session.state
        has_data = self.eval_dataset is not None or overrides(self, "get_eval_dataloader")
        if state.cfg.validation.eval_iters == 0:
            return
        if not has_data:
            if state.world.is_main:
                warn_once(logger, "no evaluation is run, although one is due or requested: pass an eval_dataset")
            return
        is_first = state.train_state.step == 0  # of eval_on_start, whose weights are not a result of the training
        is_due = state.evaluated.due_at_step == state.train_state.step
        with nullcontext() if is_due else RngState().kept():  # a requested one must not change the training
            metrics = (
                self._evaluate(self._trial, ignore_keys, skip_scheduler=True)
                if is_first
                else self._evaluate(self._trial, ignore_keys)
            )
        metrics = state.world.share(metrics)  # a script may add some on the first rank only
        if self.args.metric_for_best_model is not None:
            check_metrics(self, metrics)
        record_evaluation(state, metrics)
        if not is_first and self._determine_best_metric(metrics=metrics, trial=self._trial):
            save_best(state)

    def _evaluation(self) -> AbstractContextManager[Session]:
        """The session of an evaluation; inside of a run, that of the run."""
        raise NotImplementedError

    def _evaluate_one(
        self, session: Session, dataset: object, ignore_keys: list[str] | None, prefix: str, *, is_test: bool = False
    ) -> EvalLoopOutput:
        """Evaluate one dataset, record its metrics, and fire the event of its end. Collective."""
        self.check_evaluation()
        state, started = session.state, time.perf_counter()
        loop = self.prediction_loop if self.args.use_legacy_prediction_loop else self.evaluation_loop
        output = EvalLoopOutput(None, None, {}, 0)
        session.means = {}
        with evaluation_mode(session.model), until_interrupted(state):
            output = loop(
                self._dataloader(session, dataset, is_test),
                description="Prediction" if is_test else "Evaluation",
                prediction_loss_only=None if is_test or self.compute_metrics is not None else True,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
            self._complete(output, prefix, time.perf_counter() - started, state.trainer_state.epoch)
            record_evaluation(state, output.metrics)
            if is_test:
                keep(state, "test", output.metrics)
            else:
                self._publish(session, output.metrics)
            kind = "test" if is_test else "eval"
            session.notify.fire(f"on_{kind}_end", total_loss_dict=session.means, metrics=output.metrics)
        return output

    def _publish(self, session: Session, metrics: Metrics) -> None:
        """Log an evaluation; Megatron Bridge's tags wait for the record of a step."""
        info = session.state.info
        tags, info.bridge_tags, session.record_kind = info.bridge_tags, None, "evaluation"
        try:
            append = partial(record, session.state, notify=session.notify, kind="evaluation")
            session.state.features.wrap("log", append)(metrics)
        finally:
            info.bridge_tags, session.record_kind = tags, "log"

    def _complete(self, output: EvalLoopOutput, prefix: str, seconds: float, epoch: float) -> None:
        """Add the rates and the epoch to the metrics of an overridden `evaluation_loop`, which need not have them."""
        metrics, samples = output.metrics, output.num_samples or 0
        steps = math.ceil(samples / (self.args.eval_batch_size * self.args.world_size))
        metrics.setdefault(f"{prefix}_runtime", round(seconds, 4))
        metrics.setdefault(f"{prefix}_samples_per_second", round(samples / seconds, 3))
        metrics.setdefault(f"{prefix}_steps_per_second", round(steps / seconds, 3))
        metrics.setdefault("epoch", epoch)

    def _dataloader(self, session: Session, dataset: object, is_test: bool) -> object:
        """The loader of a dataset; an overridden loop gets one with Hugging Face's interface."""
        if overrides(self, "evaluation_loop") or overrides(self, "prediction_loop"):
            return getattr(self, "get_test_dataloader" if is_test else "get_eval_dataloader")(dataset)
        return eval_loader_of(self, dataset, session.collate, session.state.cfg, session.state.world, is_test=is_test)

    def _computes_own_loss(self) -> bool:
        return self.compute_loss_func is not None or overrides(self, "compute_loss")

    def _placed(self, inputs: Batch) -> Batch:
        """The inputs on the device, prepared by the user's method if there is one."""
        if overrides(self, "_prepare_inputs"):
            return self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        return to_device(inputs, self.session.state.world.device)

    def _full_dtype(self) -> torch.dtype | None:
        """The precision of the weights in an evaluation outside of training; None leaves them as they are."""
        if self.is_in_train:
            return None
        return torch.bfloat16 if self.args.bf16_full_eval else torch.float16 if self.args.fp16_full_eval else None

    def _preparation_time(self, session: Session) -> float | None:
        is_first = self.model_preparation_time is None and not session.state.train_state.do_train
        if is_first and not self.is_in_train:
            self.model_preparation_time = round(session.preparation_seconds, 4)
        return self.model_preparation_time

    def _write_to_trackers(self, session: Session, prefix: str, is_test: bool) -> None:
        """Send the mean losses to trackers under Megatron Bridge's tags: `validation`, or `validation <name>`."""
        state = session.state
        if session.means and state.bridge_trackers.recipients:
            kind, own = ("test", "test") if is_test else ("validation", "eval")
            with state.bridge_trackers.held(lambda: state.ending.ended):
                name = prefix.removeprefix(own).removeprefix("_")
                write_evaluation(state, session.means, f"{kind} {name}".rstrip())

    def _named(self, eval_dataset: object) -> object:
        if not isinstance(eval_dataset, str):
            return eval_dataset
        known = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else {}
        if eval_dataset not in known:
            names = ", ".join(known) or "the constructor was not passed a dict of them"
            raise ConfigError(f"eval_dataset={eval_dataset!r} is not the name of an evaluation set; known: {names}.")
        return known[eval_dataset]
