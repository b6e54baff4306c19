"""Hugging Face's methods of an evaluation, overridden, assigned and called by scripts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from onstep import Trainer, TrainerCallback, TrainingArguments
from onstep.errors import ConfigError
from onstep.trainer import EvalLoopOutput
from tests.support.small_models import LogitsModel, Regression, arguments, quiet, ragged_rows, regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def evaluated(tmp_path: Path, **options: Any) -> Any:
    """Arguments of a run of two epochs that is evaluated after each."""
    return arguments(tmp_path, **{"num_train_epochs": 2, "eval_strategy": "epoch", **options})


def make(kind: type[Trainer], args: Any, **options: Any) -> Trainer:
    rows = regression_rows(8)
    return kind(Regression(), args, train_dataset=rows, eval_dataset=rows, default_callbacks=False, **options)


def test_an_overridden_prediction_step_gives_loss_logits_and_labels(tmp_path: Path) -> None:
    class Doubled(Trainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: Any, ignore_keys: Any = None) -> Any:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return 2 * loss, None if logits is None else logits + 1, labels

    seen: list[Any] = []
    trainer = make(Doubled, arguments(tmp_path), compute_metrics=lambda p: seen.append(p) or {"n": len(p.label_ids)})
    plain = make(Trainer, arguments(tmp_path), compute_metrics=lambda p: seen.append(p) or {})
    metrics, expected = trainer.evaluate(), plain.evaluate()
    assert metrics["eval_loss"] == pytest.approx(2 * expected["eval_loss"])
    assert metrics["eval_n"] == 8
    np.testing.assert_allclose(seen[0].predictions, seen[1].predictions + 1, rtol=1e-6)
    np.testing.assert_array_equal(seen[0].label_ids, seen[1].label_ids)
    np.testing.assert_allclose(trainer.predict(regression_rows(8)).predictions, seen[0].predictions, rtol=1e-6)


def test_a_prediction_step_of_an_evaluation_of_losses_is_told_so(tmp_path: Path) -> None:
    asked: list[bool] = []

    class Asks(Trainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: Any, ignore_keys: Any = None) -> Any:
            asked.append(prediction_loss_only)
            return torch.tensor(7.0), None, None

    trainer = make(Asks, evaluated(tmp_path))
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == 7.0
    assert asked == [True] * 6
    assert [r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r] == [7.0] * 3


def test_a_prediction_step_assigned_to_the_object_is_called(tmp_path: Path) -> None:
    trainer = make(Trainer, arguments(tmp_path))
    trainer.prediction_step = lambda model, inputs, loss_only, ignore_keys=None: (3.0, None, None)  # type: ignore[method-assign]
    assert trainer.evaluate()["eval_loss"] == 3.0


def test_an_overridden_evaluation_loop_is_called_and_its_metrics_are_reported(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Loops(Trainer):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return [{key: torch.stack([row[key] for row in regression_rows(4)]) for key in ("x", "labels")}] * 2

        get_test_dataloader = get_eval_dataloader

        def evaluation_loop(
            self,
            dataloader: Any,
            description: str,
            prediction_loss_only: Any = None,
            ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            sizes = [len(batch["labels"]) for batch in dataloader]
            calls.append((description, prediction_loss_only, sizes))
            value = float(self.state.global_step or 0)
            return EvalLoopOutput(None, None, {f"{metric_key_prefix}_mine": value}, sum(sizes))

    class Heard(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            calls.append(metrics["eval_mine"])

    args = evaluated(tmp_path, metric_for_best_model="mine", greater_is_better=True)
    trainer = make(Loops, args, callbacks=[Heard])
    trainer.train()
    assert calls == [("Evaluation", True, [4, 4]), 2.0, ("Evaluation", True, [4, 4]), 4.0]
    assert trainer.state.best_metric == 4.0
    assert trainer.predict(regression_rows(2)).metrics.keys() >= {"test_mine", "test_runtime", "test_steps_per_second"}
    assert calls[-1] == ("Prediction", None, [4, 4])


def test_evaluation_loop_reads_any_iterable_of_batches(tmp_path: Path) -> None:
    rows = regression_rows(6)
    batches = [{key: torch.stack([row[key] for row in rows[n : n + 2]]) for key in ("x", "labels")} for n in (0, 2, 4)]
    trainer = make(Trainer, arguments(tmp_path))
    output = trainer.evaluation_loop(iter(batches), description="Evaluation", metric_key_prefix="mine")
    assert output.metrics["mine_loss"] == pytest.approx(trainer.evaluate(rows)["eval_loss"])
    assert (len(output.predictions), output.num_samples) == (6, 6)
    np.testing.assert_array_equal(output.label_ids, [row["labels"].item() for row in rows])
    assert "mine_loss" not in trainer.state.log_history[0], "a loop alone reports nothing"


def test_prediction_step_can_be_called_by_a_script(tmp_path: Path) -> None:
    trainer = make(Trainer, arguments(tmp_path))
    batch = {key: torch.stack([row[key] for row in regression_rows(3)]) for key in ("x", "labels")}
    loss, logits, labels = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    assert not logits.requires_grad
    assert loss.item() == pytest.approx((logits - labels).square().mean().item())
    assert trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)[1:] == (None, None)


def test_an_overridden_evaluate_is_called_for_each_of_a_dict_of_sets(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Counts(Trainer):
        def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
            calls.append("run")
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

        def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
            calls.append(metric_key_prefix)
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return {**metrics, f"{metric_key_prefix}_seen": 1}

    sets = {"a": regression_rows(4), "b": regression_rows(8)}
    args = evaluated(tmp_path, num_train_epochs=1)
    trainer = Counts(Regression(), args, train_dataset=sets["a"], eval_dataset=sets, default_callbacks=False)
    trainer.train()
    assert calls == ["run", "eval", "eval_a", "eval_b"]
    assert trainer.evaluate().keys() >= {"eval_seen", "eval_a_seen", "eval_b_seen", "eval_a_loss", "eval_b_loss"}


def test_what_determine_best_metric_says_decides_the_save(tmp_path: Path) -> None:
    class Second(Trainer):
        def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
            super()._determine_best_metric(metrics, trial)
            return bool(self.state.global_step == 2)

    args = evaluated(tmp_path, num_train_epochs=3, save_strategy="best", metric_for_best_model="loss")
    make(Second, args).train()
    assert [path.name for path in sorted((tmp_path / "run").rglob("checkpoint-*"))] == ["checkpoint-2"]


def test_a_metric_for_the_best_model_that_does_not_exist_ends_the_first_evaluation(tmp_path: Path) -> None:
    args = evaluated(tmp_path, metric_for_best_model="acuracy")
    trainer = make(Trainer, args, compute_metrics=lambda p: {"accuracy": 1.0})
    with pytest.raises(
        ConfigError,
        match=r"TrainingArguments.metric_for_best_model='acuracy' is not a metric of the evaluation, which has "
        r"epoch, eval_accuracy, eval_loss",
    ):
        trainer.train()
    assert trainer.state.global_step == 2


def answering(base: Any) -> Any:
    """A question-answering trainer in the style of transformers' examples, which evaluates by hand."""

    class Answering(base):  # type: ignore[misc]
        def __init__(self, *args: Any, eval_examples: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.eval_examples = eval_examples

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            rows = eval_dataset or self.eval_dataset
            return [{key: torch.stack([row[key] for row in rows]) for key in rows[0]}]

        def evaluate(
            self,
            eval_dataset: Any = None,
            eval_examples: Any = None,
            ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
            examples = self.eval_examples if eval_examples is None else eval_examples
            loader = self.get_eval_dataloader(eval_dataset)
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            started = time.time()
            try:
                output = self.evaluation_loop(
                    loader,
                    description="Evaluation",
                    prediction_loss_only=True if compute_metrics is None else None,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=metric_key_prefix,
                )
            finally:
                self.compute_metrics = compute_metrics
            output.metrics[f"{metric_key_prefix}_runtime"] = time.time() - started
            answers = output.predictions[: len(examples)]
            computed = compute_metrics((answers, examples))
            metrics = {f"{metric_key_prefix}_{key}": value for key, value in computed.items()}
            metrics.update(output.metrics)
            if self.is_in_train:
                self.log(metrics)
                if hasattr(self, "callback_handler"):
                    self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return Answering


def test_a_question_answering_trainer_evaluates_its_own_way_and_its_metric_is_followed(tmp_path: Path) -> None:
    """As under transformers. Its evaluation set has no labels, and more features than examples."""
    rows, calls = regression_rows(8), []

    def compute(found: Any) -> dict[str, float]:
        answers, examples = found
        calls.append(len(answers))
        return {"distance": float(np.abs(answers - examples).mean())}

    values = {
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "num_train_epochs": 3,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
        "max_grad_norm": 0.0,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "metric_for_best_model": "distance",
        "greater_is_better": True,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    given: dict[str, Any] = {
        "train_dataset": rows,
        "eval_dataset": [{"x": row["x"]} for row in rows],
        "eval_examples": np.zeros(5),
        "compute_metrics": compute,
    }
    mine = answering(Trainer)(
        Regression(), TrainingArguments(str(tmp_path / "ours"), **values), default_callbacks=False, **given
    )
    their = answering(transformers.Trainer)(
        Regression(), transformers.TrainingArguments(str(tmp_path / "theirs"), **values), **given
    )
    their.remove_callback(transformers.PrinterCallback)
    for trainer in (mine, their):
        trainer.train()
    assert calls == [5] * 6
    found, expected = (
        [record["eval_distance"] for record in one.state.log_history if "eval_distance" in record]
        for one in (mine, their)
    )
    assert found == pytest.approx(expected, rel=1e-5)
    assert mine.state.best_metric == pytest.approx(their.state.best_metric, rel=1e-5)
    assert mine.evaluate()["eval_distance"] == pytest.approx(found[-1], rel=1e-6), "outside of a run too"


def test_a_prediction_loop_is_called_on_request_and_refused_without(tmp_path: Path) -> None:
    class Old(Trainer):
        def prediction_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
            output = super().prediction_loop(dataloader, description, *args, **kwargs)
            return output._replace(metrics={**output.metrics, "eval_old": 1})

    class WithDataloader(Old):
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return [{key: torch.stack([row[key] for row in eval_dataset]) for key in ("x", "labels")}]

    args = arguments(tmp_path)
    args.use_legacy_prediction_loop = True
    assert make(WithDataloader, args).evaluate()["eval_old"] == 1
    for act in (Trainer.train, Trainer.evaluate):
        with pytest.raises(ConfigError, match=r"Old overrides prediction_loop, .* = True"):
            act(make(Old, arguments(tmp_path)))


def test_label_names_are_found_in_the_models_forward(tmp_path: Path) -> None:
    class SpanQuestionAnswering(Regression):
        def forward(self, x: Any, start_positions: Any = None, end_positions: Any = None) -> Any:  # type: ignore[override]
            return super().forward(x, None if start_positions is None else start_positions - end_positions)

    rows = [{"x": r["x"], "start_positions": r["labels"], "end_positions": r["labels"]} for r in regression_rows(3)]
    trainer = quiet(SpanQuestionAnswering(), arguments(tmp_path))
    assert trainer.label_names == ["start_positions", "end_positions"]
    start, end = trainer.predict(rows).label_ids
    np.testing.assert_array_equal(start, end)
    np.testing.assert_array_equal(start, [row["start_positions"].item() for row in rows])


def test_an_evaluation_without_labels_has_no_loss_where_predictions_are_asked_for(tmp_path: Path) -> None:
    tokens = [{"input_ids": row["input_ids"]} for row in ragged_rows(2)]
    trainer = quiet(LogitsModel(), arguments(tmp_path), compute_metrics=lambda p: pytest.fail("there are no labels"))
    assert not [name for name in trainer.evaluate(tokens) if name.endswith("loss")]


def test_a_prediction_step_copied_from_transformers_gives_the_same(tmp_path: Path) -> None:

    class Copied(Trainer):
        prediction_step = transformers.Trainer.prediction_step

    seen: list[Any] = []
    for kind in (Copied, Trainer):
        trainer = make(kind, evaluated(tmp_path / kind.__name__), compute_metrics=lambda p: seen.append(tuple(p)) or {})
        trainer.train()
        seen.append(trainer.evaluate()["eval_loss"])
    half = len(seen) // 2
    assert seen[half - 1] == pytest.approx(seen[-1])
    for one, other in zip(seen[: half - 1], seen[half:-1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_an_evaluation_loop_like_that_of_transformers_4_gives_the_same(tmp_path: Path) -> None:

    class Loops(Trainer):
        def evaluation_loop(
            self,
            dataloader: Any,
            description: str,
            prediction_loss_only: Any = None,
            ignore_keys: Any = None,
            metric_key_prefix: str = "eval",
        ) -> Any:
            model = self._wrap_model(self.model, training=False, dataloader=dataloader)
            model.eval()
            self.callback_handler.eval_dataloader = dataloader
            losses, all_logits, all_labels = [], [], []
            for inputs in dataloader:
                loss, logits, labels = self.prediction_step(model, inputs, False, ignore_keys=ignore_keys)
                losses.append(self.gather_function(loss.repeat(len(labels))))
                all_logits.append(self.gather_function(self.accelerator.pad_across_processes(logits, dim=1)))
                all_labels.append(self.gather_function(labels))
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            self.gather_function = self.accelerator.gather_for_metrics
            logits, labels = torch.cat(all_logits).numpy(), torch.cat(all_labels).numpy()
            metrics = self.compute_metrics(transformers.EvalPrediction(predictions=logits, label_ids=labels))
            metrics["loss"] = torch.cat(losses).mean().item()
            prefixed = {f"{metric_key_prefix}_{key}": value for key, value in metrics.items()}
            return EvalLoopOutput(logits, labels, prefixed, len(labels))

    def compute(prediction: Any) -> dict[str, float]:
        return {"error": float(np.abs(prediction.predictions - prediction.label_ids).mean())}

    found = []
    for kind in (Loops, Trainer):
        trainer = make(kind, evaluated(tmp_path / kind.__name__), compute_metrics=compute)
        trainer.train()
        found.append([(r["eval_loss"], r["eval_error"]) for r in trainer.state.log_history if "eval_loss" in r])
    assert len(found[0]) == 2
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_an_override_that_needs_no_data_evaluates_without_a_dataset(tmp_path: Path) -> None:
    class Evaluator(Trainer):
        """As sentence-transformers' with an evaluator alone."""

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader([])  # type: ignore[var-annotated]

        def evaluation_loop(self, *args: Any, **options: Any) -> Any:
            output = super().evaluation_loop(*args, **options)
            output.metrics["eval_score"] = float(self.state.global_step or 0)
            return output

    trainer = Evaluator(Regression(), evaluated(tmp_path), train_dataset=regression_rows(8), default_callbacks=False)
    trainer.train()
    assert [one["eval_score"] for one in trainer.state.log_history if "eval_score" in one] == [2.0, 4.0]
    assert trainer.evaluate()["eval_score"] == 4.0
