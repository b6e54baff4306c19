"""One evaluation of one dataset by the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onstep.trainer.loading import eval_loader
from onstep.trainer.outputs import EvalPrediction
from onstep.trainer.predictions import PredictionCollector
from onstep.training.evaluation import evaluate

if TYPE_CHECKING:
    from onstep.trainer.preparation import Preparation
    from onstep.trainer.trainer import Trainer


class EvaluationJob:
    """Evaluates a dataset with the loop's `evaluate` and collects predictions where somebody wants them."""

    def __init__(
        self,
        trainer: Trainer,
        run: Preparation,
        ignore_keys: list[str],
        prefix: str,
        *,
        is_test: bool,
        keeps_predictions: bool,
    ) -> None:
        self._trainer = trainer
        self._run = run
        self._prefix = prefix
        self._is_test = is_test
        self._ignore_keys = ignore_keys
        self._keeps_predictions = keeps_predictions
        self.metrics: dict[str, Any] = {}
        self.predictions: Any = None
        self.label_ids: Any = None

    def run(self, dataset: Any) -> None:
        """Evaluate. Collective."""
        trainer, run, state = self._trainer, self._run, self._run.state
        loader = eval_loader(trainer, state, dataset, run.module)
        if self._keeps_predictions:
            run.forward_step.collector = PredictionCollector(
                trainer.args.label_names or ["labels"],
                [*self._ignore_keys, *_ignored_by(run.module)],
                trainer.preprocess_logits_for_metrics,
                keep_inputs="inputs" in trainer.args.include_for_metrics,
            )
        before = state.eval_dataloader
        state.eval_dataloader = loader
        try:
            evaluate(
                state,
                run.forward_step,
                loader,
                run.model,
                None,
                state.cfg.model,
                is_test=self._is_test,
                tell=run.tell,
                metric_key_prefix=self._prefix,
                extra_metrics=self._computed_metrics,
            )
        finally:
            run.forward_step.collector = None
            state.eval_dataloader = before
        self.metrics = state.last_metrics

    def _computed_metrics(self) -> dict[str, Any]:
        collector = self._run.forward_step.collector
        if collector is None:
            return {}
        self.predictions, self.label_ids, inputs = collector.gather(self._run.state.world)
        compute = self._trainer.compute_metrics
        if compute is None or self.label_ids is None:
            return {}
        metrics = compute(EvalPrediction(self.predictions, self.label_ids, inputs))
        prefix = f"{self._prefix}_"
        return {key if key.startswith(prefix) else prefix + key: _plain(value) for key, value in metrics.items()}


def _ignored_by(module: Any) -> list[str]:
    """Outputs, such as a key/value cache, that a `transformers` model says are no predictions."""
    config = getattr(module, "config", None)
    return list(getattr(config, "keys_to_ignore_at_inference", None) or [])


def _plain(value: Any) -> Any:
    """A NumPy or torch scalar as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
