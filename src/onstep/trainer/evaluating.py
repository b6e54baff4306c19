"""One evaluation of one dataset by the Trainer."""

from __future__ import annotations

from typing import Any

from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.loading import eval_loader
from onstep.trainer.outputs import EvalPrediction, PredictionOutput
from onstep.trainer.predictions import Collected, PredictionCollector
from onstep.trainer.session import Session
from onstep.trainer.wrappers import inner_module
from onstep.training.evaluation import evaluate, write_evaluation


class EvaluationJob:
    """Evaluates a dataset with the loop's `evaluate` and collects predictions where somebody wants them.

    Args:
        prefix: what the metrics' names start with.
        ignore_keys: outputs of the model that are no predictions.
        is_test: a test, for `predict`: all of the set, which may have no labels.
    """

    def __init__(
        self,
        trainer: BaseTrainer,
        session: Session,
        prefix: str,
        ignore_keys: list[str] | None = None,
        *,
        is_test: bool = False,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._prefix = prefix
        self._is_test = is_test
        self._ignore_keys = [*(ignore_keys or ()), *_no_predictions(session.module)]
        self._collected = Collected()

    def run(self, dataset: Any) -> PredictionOutput:
        """Evaluate. Collective."""
        session = self._session
        state, step = session.state, session.forward_step
        before = state.door.eval_dataloader, step.collector
        loader = eval_loader(dataset, session.collate, state.cfg, state.world, is_test=self._is_test)
        state.door.eval_dataloader, step.collector = loader, self._collector()
        try:
            means, _, _ = evaluate(
                state,
                step,
                loader,
                session.model,
                None,
                state.cfg.model,
                is_test=self._is_test,
                tell=session.tell,
                metric_key_prefix=self._prefix,
                extra_metrics=self._computed_metrics,
            )
        finally:
            state.door.eval_dataloader, step.collector = before
        if means and state.trackers.takers:
            with state.trackers.held(lambda: state.ending.ended):
                write_evaluation(state, means, self._kind)
        return PredictionOutput(self._collected.predictions, self._collected.label_ids, state.evaluated.last_metrics)

    @property
    def _kind(self) -> str:
        """What trackers with Megatron Bridge's tags call the set: `validation`, or `validation <name>` of several."""
        kind, prefix = ("test", "test") if self._is_test else ("validation", "eval")
        return f"{kind} {self._prefix.removeprefix(prefix).removeprefix('_')}".rstrip()

    def _collector(self) -> PredictionCollector | None:
        trainer = self._trainer
        is_wanted = self._is_test or trainer.compute_metrics is not None
        if not is_wanted or trainer.args.prediction_loss_only:
            return None
        keeps_inputs = "inputs" in trainer.args.include_for_metrics
        return PredictionCollector(
            self._session.labels,
            self._ignore_keys,
            trainer.preprocess_logits_for_metrics,
            getattr(self._session.module, "main_input_name", "input_ids") if keeps_inputs else None,
            self._is_test,
        )

    def _computed_metrics(self) -> dict[str, Any]:
        collector, compute = self._session.forward_step.collector, self._trainer.compute_metrics
        if collector is None:
            return {}
        self._collected = predictions, label_ids, inputs, losses = collector.gather(self._session.state.world)
        if compute is None or predictions is None or label_ids is None:
            return {}
        wanted_losses = losses if "loss" in self._trainer.args.include_for_metrics else None
        metrics = compute(EvalPrediction(predictions, label_ids, inputs, wanted_losses))
        prefix = f"{self._prefix}_"
        return {key if key.startswith(prefix) else prefix + key: _plain(value) for key, value in metrics.items()}


def _no_predictions(module: Any) -> list[str]:
    """Outputs, such as a key/value cache, that a `transformers` model says are no predictions."""
    config = getattr(inner_module(module), "config", None)
    return list(getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"])


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
