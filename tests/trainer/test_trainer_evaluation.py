"""`evaluate` and `predict`: metrics, predictions in order, and what survives between calls."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from onstep import EarlyStoppingCallback, Trainer, TrainerCallback
from onstep.errors import ConfigError, DataError, UnsupportedStateError
from tests.support.small_models import (
    IGNORE,
    LogitsModel,
    Regression,
    Stream,
    TokenModel,
    arguments,
    causal_rows,
    quiet,
    qwen,
    qwen_classifier,
    ragged_rows,
    regression_rows,
)


def test_the_loss_is_the_mean_over_all_labels_and_perplexity_follows(tmp_path: Path) -> None:
    rows, model = ragged_rows(10), TokenModel()
    metrics = quiet(model, arguments(tmp_path), eval_dataset=rows).evaluate()
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    loss = model(**batch)["loss"].item()
    # float32 sums of batches, against one of all rows
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics.keys() >= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch"}


@pytest.mark.parametrize("model", [TokenModel(), LogitsModel()])
def test_the_set_without_a_label_is_named_and_is_never_the_best(
    model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ragged_rows(4)
    empty = [{**row, "labels": torch.full_like(row["labels"], IGNORE)} for row in rows]
    options: Any = {"compute_loss_func": summed} if isinstance(model, LogitsModel) else {}
    trainer = quiet(model, arguments(tmp_path), eval_dataset={"good": rows, "wrong": empty}, **options)
    metrics = trainer.evaluate()
    assert math.isnan(metrics["eval_wrong_loss"])
    assert not math.isnan(metrics["eval_good_loss"])
    assert "the eval_wrong data has no label to compute a loss from in 4 samples (all are -100)" in caplog.text


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    total = torch.nn.functional.cross_entropy(
        outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / max(1, int(num_items_in_batch))


def test_a_dict_of_sets_is_evaluated_under_its_names(tmp_path: Path) -> None:
    sets = {"first": regression_rows(4), "second": regression_rows(7)}
    trainer = quiet(Regression(), arguments(tmp_path), eval_dataset=sets)
    metrics = trainer.evaluate()
    assert metrics["eval_first_loss"] != metrics["eval_second_loss"]
    assert trainer.evaluate("second")["eval_second_loss"] == metrics["eval_second_loss"]
    alone = quiet(Regression(), arguments(tmp_path)).evaluate(sets["second"], metric_key_prefix="mine")
    assert alone["mine_loss"] == metrics["eval_second_loss"]
    with pytest.raises(ValueError, match="'third' is not the name of an evaluation set; known: first, second"):
        trainer.evaluate("third")


def test_the_best_of_a_dict_of_sets_is_followed_by_its_name(tmp_path: Path) -> None:
    sets = {"a": regression_rows(4), "b": regression_rows(8)}
    args = arguments(tmp_path, eval_strategy="epoch", metric_for_best_model="b_loss", num_train_epochs=2)
    trainer = quiet(Regression(), args, regression_rows(), eval_dataset=sets)
    trainer.train()
    history = [record["eval_b_loss"] for record in trainer.state.log_history if "eval_b_loss" in record]
    assert trainer.state.best_metric == min(history)


def test_metrics_are_computed_from_predictions_in_the_order_of_the_set(tmp_path: Path) -> None:
    seen: list[Any] = []

    def compute(prediction: Any) -> dict[str, Any]:
        logits, labels = prediction
        seen.append((logits, labels))
        return {"error": np.float64(np.abs(logits - labels).max()), "eval_rows": len(labels), "best": torch.tensor(3)}

    rows, model = regression_rows(6), Regression()
    metrics = quiet(model, arguments(tmp_path), eval_dataset=rows, compute_metrics=compute).evaluate()
    logits = model(torch.stack([row["x"] for row in rows]))["logits"].detach().numpy()
    ((found, labels),) = seen
    np.testing.assert_allclose(found, logits, rtol=1e-6)
    np.testing.assert_array_equal(labels, [row["labels"].item() for row in rows])
    assert metrics["eval_error"] == pytest.approx(np.abs(logits - labels).max())
    assert (metrics["eval_rows"], metrics["eval_best"]) == (6, 3)
    assert all(isinstance(value, (int, float)) for value in metrics.values())


def test_what_is_asked_for_reaches_compute_metrics(tmp_path: Path) -> None:
    seen: list[Any] = []
    args = arguments(tmp_path, include_for_metrics=["inputs", "loss"], per_device_eval_batch_size=2)
    rows = ragged_rows(3)
    quiet(TokenModel(), args, compute_metrics=lambda p: seen.append(tuple(p)) or {}, eval_dataset=rows).evaluate()
    ((logits, labels, inputs, losses),) = seen
    assert logits.shape == (3, 9, 23)
    np.testing.assert_array_equal(inputs, torch.stack([row["input_ids"] for row in rows]))
    np.testing.assert_array_equal(labels, torch.stack([row["labels"] for row in rows]))
    assert losses[0] == losses[1] != losses[2]


def test_prediction_loss_only_keeps_no_predictions(tmp_path: Path) -> None:
    trainer = quiet(
        Regression(), arguments(tmp_path, prediction_loss_only=True), compute_metrics=lambda p: pytest.fail("called")
    )
    assert "eval_loss" in trainer.evaluate(regression_rows(4))
    output = trainer.predict(regression_rows(4))
    assert output.predictions is None
    assert "test_loss" in output.metrics


def test_logits_are_preprocessed_before_they_are_kept(tmp_path: Path) -> None:
    def pick(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.argmax(-1)

    def accuracy(prediction: Any) -> dict[str, float]:
        real = prediction.label_ids != IGNORE
        return {"accuracy": float((prediction.predictions == prediction.label_ids)[real].mean())}

    rows, model = ragged_rows(10), TokenModel()
    trainer = quiet(
        model, arguments(tmp_path), eval_dataset=rows, preprocess_logits_for_metrics=pick, compute_metrics=accuracy
    )
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    real = batch["labels"] != IGNORE
    expected = (model(**batch)["logits"].argmax(-1) == batch["labels"])[real].float().mean().item()
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(expected)


def test_label_names_say_where_the_labels_are(tmp_path: Path) -> None:
    class Named(Regression):
        def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(x, target)

    rows = [{"x": row["x"], "target": row["labels"]} for row in regression_rows(5)]
    trainer = quiet(Named(), arguments(tmp_path, label_names=["target"]), rows)
    trainer.train()
    np.testing.assert_array_equal(trainer.predict(rows).label_ids, [row["target"].item() for row in rows])
    assert quiet(Named(), arguments(tmp_path)).predict(rows).label_ids is None


def test_rows_of_unequal_length_are_padded_to_one_array(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(1, n), "labels": torch.arange(1, n)} for n in (3, 3, 6, 6, 5)]
    args = arguments(tmp_path, per_device_eval_batch_size=2)
    output = quiet(TokenModel(), args).predict(rows)
    assert output.predictions.shape == (5, 5, 23)
    np.testing.assert_array_equal(output.label_ids[0], [1, 2, IGNORE, IGNORE, IGNORE])
    assert (output.predictions[4, 4:] == IGNORE).all()


def test_a_set_without_labels_has_predictions_and_no_loss(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Tracker(TrainerCallback):
        def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            calls.append(metrics)

    rows = [{"x": row["x"]} for row in regression_rows(6)]
    model = Regression()
    output = quiet(model, arguments(tmp_path), callbacks=[Tracker]).predict(rows)
    assert output.label_ids is None
    assert "test_loss" not in output.metrics
    assert calls == [output.metrics]
    np.testing.assert_allclose(output.predictions, model(torch.stack([r["x"] for r in rows]))["logits"].detach())
    tokens = [{"input_ids": row["input_ids"]} for row in ragged_rows(2)]
    assert quiet(LogitsModel(), arguments(tmp_path)).predict(tokens).predictions.shape == (2, 9, 23)


def test_a_transformers_model_is_evaluated_and_predicts_as_it_comes(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "label": n % 3} for n, row in enumerate(causal_rows(5))]

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer = quiet(qwen_classifier(), arguments(tmp_path), rows, eval_dataset=rows, compute_metrics=accuracy)
    trainer.train()
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
    output = trainer.predict(rows)
    assert output.predictions.shape == (5, 3)
    np.testing.assert_array_equal(output.label_ids, [0, 1, 2, 0, 1])
    unlabelled = [{"input_ids": row["input_ids"]} for row in rows]
    np.testing.assert_array_equal(trainer.predict(unlabelled).predictions, output.predictions)
    assert quiet(qwen(), arguments(tmp_path)).predict(causal_rows(3)).predictions.shape == (3, 10, 23)


def test_outputs_that_are_no_predictions_are_left_out(tmp_path: Path) -> None:
    class Two(Regression):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            outputs = super().forward(x, labels)
            return {**outputs, "features": x, "past_key_values": x}

    trainer = quiet(Two(), arguments(tmp_path))
    logits, features = trainer.predict(regression_rows(5)).predictions
    assert (logits.shape, features.shape) == ((5,), (5, 3))
    assert trainer.predict(regression_rows(5), ignore_keys=["features"]).predictions.shape == (5,)


def test_tuples_go_to_the_model_by_position_and_their_last_element_to_a_loss_function(tmp_path: Path) -> None:
    rows = TensorDataset(*(torch.stack([row[key] for row in regression_rows(7)]) for key in ("x", "labels")))

    def squared(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.squeeze(-1) - labels).square().mean()

    trainer = quiet(nn.Linear(3, 1), arguments(tmp_path), rows, eval_dataset=rows, compute_loss_func=squared)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    output = trainer.predict(rows)
    np.testing.assert_array_equal(output.label_ids, rows.tensors[1])
    assert output.predictions.shape == (7, 1)
    by_position = quiet(Regression(), arguments(tmp_path)).evaluate(rows)
    assert by_position["eval_loss"] == pytest.approx(
        quiet(Regression(), arguments(tmp_path)).evaluate(regression_rows(7))["eval_loss"]
    )


def test_max_eval_steps_limits_an_evaluation_and_never_a_prediction(tmp_path: Path) -> None:
    trainer = quiet(
        Regression(), arguments(tmp_path, max_eval_steps=1), compute_metrics=lambda p: {"n": len(p.label_ids)}
    )
    assert trainer.evaluate(regression_rows(10))["eval_n"] == 4
    assert len(trainer.predict(regression_rows(10)).predictions) == 10


def test_a_stream_without_a_length_can_be_evaluated(tmp_path: Path) -> None:
    rows = regression_rows(6)
    trainer = quiet(Regression(), arguments(tmp_path))
    assert trainer.evaluate(Stream(rows))["eval_loss"] == trainer.evaluate(rows)["eval_loss"]


def test_the_trained_model_is_evaluated_with_its_progress(tmp_path: Path) -> None:
    rows = regression_rows()
    trainer = quiet(None, arguments(tmp_path, num_train_epochs=2), rows, eval_dataset=rows, model_init=Regression)
    fresh = trainer.evaluate()["eval_loss"]
    trainer.train()
    model, metrics = trainer.model, trainer.evaluate()
    assert trainer.model is model
    assert metrics["eval_loss"] < fresh
    assert metrics["eval_loss"] == trainer.evaluate()["eval_loss"]
    assert (metrics["epoch"], trainer.state.global_step) == (2.0, 6)
    assert trainer.state.log_history[-1] == {
        **trainer.state.log_history[-1],
        "eval_loss": metrics["eval_loss"],
        "step": 6,
    }


def test_every_training_with_model_init_starts_from_a_new_model(tmp_path: Path) -> None:
    made: list[nn.Module] = []

    def init(trial: Any) -> nn.Module:
        assert trial is None
        made.append(nn.Linear(3, 1))
        return made[-1]

    def squared(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.squeeze(-1) - labels).square().mean()

    rows = TensorDataset(*(torch.stack([row[key] for row in regression_rows(8)]) for key in ("x", "labels")))
    trainer = quiet(None, arguments(tmp_path), rows, model_init=init, compute_loss_func=squared)
    first = trainer.train()
    torch.manual_seed(123)
    second = trainer.train()
    assert len(made) == 2
    assert trainer.model is made[1]
    assert first.training_loss == second.training_loss, "the seed is set before each"


def test_an_evaluation_leaves_the_modes_of_the_model_as_they_were(tmp_path: Path) -> None:
    model = Regression()
    model.layer.eval()
    quiet(model, arguments(tmp_path)).evaluate(regression_rows(4))
    assert (model.training, model.layer.training) == (True, False)


def test_intervals_that_are_a_share_of_the_run_mean_nothing_to_an_evaluation(tmp_path: Path) -> None:
    args = arguments(tmp_path, logging_steps=0.5, eval_strategy="steps", eval_steps=0.5)
    assert "eval_loss" in quiet(Regression(), args).evaluate(regression_rows(4))


def test_there_must_be_something_to_evaluate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="requires an eval_dataset"):
        quiet(Regression(), arguments(tmp_path)).evaluate()
    with pytest.raises(ValueError, match="evaluation dataset is empty"):
        quiet(Regression(), arguments(tmp_path)).evaluate([])


def test_an_evaluation_that_a_callback_requests_without_data_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Requests(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = True

    quiet(Regression(), arguments(tmp_path, max_steps=3), regression_rows(12), callbacks=[Requests()]).train()
    assert caplog.text.count("no evaluation is run, although one is due or requested: pass an eval_dataset") == 1


@pytest.mark.parametrize("options", [{"metric_for_best_model": "loss"}, {"lr_scheduler_type": "reduce_lr_on_plateau"}])
def test_an_overridden_evaluate_must_return_the_metrics_where_the_best_or_the_schedule_depends_on_one(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    class Forgets(Trainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            super().evaluate(*args, **kwargs)

    args, rows = arguments(tmp_path, eval_strategy="steps", eval_steps=1, **options), regression_rows(4)
    with pytest.raises(ConfigError, match=r"Forgets\.evaluate returned None .*; return super\(\)\.evaluate"):
        Forgets(Regression(), args, train_dataset=regression_rows(12), eval_dataset=rows).train()


def test_a_compute_loss_that_pops_the_labels_takes_them_from_nobody_else(tmp_path: Path) -> None:
    class Pops(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = (outputs["logits"] - labels).square().mean()
            return (loss, outputs) if return_outputs else loss

    seen: list[Any] = []

    class Batch(TrainerCallback):
        def on_forward_backward_end(self, micro_batch: Any, **kwargs: Any) -> None:
            seen.append(sorted(micro_batch))

    rows = regression_rows(4)
    trainer = Pops(Regression(), arguments(tmp_path), train_dataset=rows, callbacks=[Batch], default_callbacks=False)
    trainer.train()
    assert seen == [["labels", "x"]]
    np.testing.assert_array_equal(trainer.predict(rows).label_ids, [row["labels"].item() for row in rows])


def test_a_compute_loss_must_give_the_outputs_that_predictions_are_made_of(tmp_path: Path) -> None:
    class Forgets(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return model(**inputs)["loss"]

    with pytest.raises(ValueError, match=r"must return \(loss, outputs\), got Tensor"):
        Forgets(Regression(), arguments(tmp_path), default_callbacks=False).predict(regression_rows(4))


def test_training_is_not_asked_for_outputs_after_an_evaluation_was(tmp_path: Path) -> None:
    asked: list[tuple[bool, bool]] = []

    class Asks(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
            asked.append((model.training, return_outputs))
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    trainer = Asks(
        Regression(),
        arguments(tmp_path, num_train_epochs=2, eval_strategy="epoch"),
        train_dataset=regression_rows(4),
        eval_dataset=regression_rows(4),
        compute_metrics=lambda prediction: {},
        default_callbacks=False,
    )
    trainer.train()
    assert asked == [(True, False), (False, True)] * 2


def test_a_tuple_of_outputs_starts_with_the_loss_where_there_are_labels(tmp_path: Path) -> None:
    class Tuples(Regression):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            outputs = super().forward(x, labels)
            return tuple(outputs.values())

    rows = regression_rows(5)
    trainer = quiet(Tuples(), arguments(tmp_path), rows)
    trainer.train()
    labelled, unlabelled = trainer.predict(rows), trainer.predict([{"x": row["x"]} for row in rows])
    assert labelled.predictions.shape == (5,)
    np.testing.assert_array_equal(labelled.predictions, unlabelled.predictions)


class Unlabelled(nn.Module):
    """Its loss needs no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x).squeeze(-1)
        return {"loss": logits.square().mean(), "logits": logits}


def test_metrics_that_cannot_be_computed_without_labels_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"x": row["x"]} for row in regression_rows(4)]
    quiet(Unlabelled(), arguments(tmp_path), eval_dataset=rows, compute_metrics=lambda given: {"a": 1.0}).evaluate()
    assert "compute_metrics is not called: the evaluated samples have no labels; set label_names" in caplog.text


def test_a_metric_that_replaces_the_measured_loss_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def compute(given: Any) -> dict[str, float]:
        return {"loss": 5.0, "accuracy": 1.0}

    quiet(Regression(), arguments(tmp_path), eval_dataset=regression_rows(4), compute_metrics=compute).evaluate()
    assert "compute_metrics returns eval_loss, which replaces what was measured" in caplog.text


def test_rows_with_a_dimension_of_one_have_the_loss_of_rows_without(tmp_path: Path) -> None:
    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in causal_rows(4)]
    nested = [{key: value[None] for key, value in row.items()} for row in rows]  # of `return_tensors="pt"`
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)  # flattens any leading dimensions
    flat, deep = (
        quiet(copy.deepcopy(model), arguments(tmp_path / name), data, eval_dataset=data)
        for name, data in (("flat", rows), ("deep", nested))
    )
    assert deep.evaluate()["eval_loss"] == pytest.approx(flat.evaluate()["eval_loss"])
    assert deep.train().training_loss == pytest.approx(flat.train().training_loss)


def nan_first(values: list[float]) -> Any:
    given = iter([math.nan, *values])
    return lambda prediction: {"score": next(given)}


def test_a_nan_is_never_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score", "max_steps": 4}
    saving = {"save_strategy": "best", "load_best_model_at_end": True}
    rows = regression_rows()
    given = {"eval_dataset": rows, "compute_metrics": nan_first([0.5, 0.7, 0.6])}
    trainer = quiet(Regression(), arguments(tmp_path, **options, **saving), rows, **given)
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.7, 3)
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-3")
    assert "eval_score is NaN at step 1, so it is not the best" in caplog.text


def test_a_nan_is_no_improvement_and_hides_none(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score", "max_steps": 5}
    rows = regression_rows(20)
    given = {"eval_dataset": rows, "compute_metrics": nan_first([0.5, 0.6, math.nan, math.nan])}
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = quiet(Regression(), arguments(tmp_path, **options), rows, callbacks=[stop], **given)
    assert trainer.train().global_step == 5
    assert (stop.early_stopping_patience_counter, trainer.state.best_metric) == (2, 0.6)


def test_a_metric_that_no_checkpoint_can_hold_is_refused_at_the_first_evaluation(tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_strategy="epoch", num_train_epochs=3)
    rows = regression_rows()
    trainer = quiet(Regression(), args, rows, eval_dataset=rows, compute_metrics=lambda given: {"kind": object()})
    with pytest.raises(UnsupportedStateError, match="the metric 'eval_kind'"):
        trainer.train()
    assert trainer.state.epoch == 1


def test_an_empty_evaluation_set_is_named_before_the_training(tmp_path: Path) -> None:
    sets, model = {"a": regression_rows(4), "b": []}, Regression()
    trainer = quiet(model, arguments(tmp_path, eval_strategy="epoch"), regression_rows(8), eval_dataset=sets)
    for call in (trainer.train, trainer.evaluate):
        with pytest.raises(DataError, match="the evaluation dataset 'b' is empty: it has 0 samples"):
            call()
    assert not (tmp_path / "run/run.json").exists()
    trainer.eval_dataset = {}
    with pytest.raises(DataError, match=r"eval_dataset=\{\} has no dataset"):
        trainer.train()
    parts = [TensorDataset(torch.ones(2, 2)), TensorDataset(torch.ones(2, 2))]
    with pytest.raises(DataError, match="eval_dataset is a list of 2 datasets, not of samples; pass a dict of them"):
        trainer.evaluate(parts)
    trainer.train_dataset = parts
    with pytest.raises(DataError, match=r"train_dataset is a list of 2 datasets.*ConcatDataset"):
        trainer.train()
