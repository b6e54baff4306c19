"""Each argument of an evaluation has its effect, compared with `transformers` where it computes numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from onstep import Trainer
from onstep.errors import ConfigError
from tests.support.small_models import (
    Regression,
    TokenModel,
    arguments,
    quiet,
    qwen_classifier,
    ragged_rows,
    regression_rows,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def theirs(model: Any, tmp_path: Path, compute_metrics: Any = None, **options: Any) -> Any:
    """A Trainer of transformers with the arguments of `arguments`."""
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        **options,
    )
    rows = regression_rows(8)
    trainer = transformers.Trainer(model, args, train_dataset=rows, eval_dataset=rows, compute_metrics=compute_metrics)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class Structured(Regression):
    """Gives a tuple of a dict and a list beside its logits, one part of another length in each batch."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        outputs = super().forward(x, labels)
        width = len(x)
        parts = {"wide": x[:, :1].expand(-1, width), "same": x}
        return {**outputs, "parts": parts, "more": [x[:, 0], (x[:, 1], x.unsqueeze(1).expand(-1, width, -1))]}


def same(found: Any, expected: Any) -> None:
    """Check that two nested structures have the same types and numbers."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, part in expected.items():
            same(found[key], part)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"eval_do_concat_batches": False}, {"eval_accumulation_steps": 2}])
def test_nested_predictions_are_those_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    """The last of three batches is shorter, so parts are padded with -100; without joining there is a list."""
    rows = regression_rows(10)
    output = quiet(Structured(), arguments(tmp_path, **options)).predict(rows)
    expected = theirs(Structured(), tmp_path, **options).predict(rows)
    same(output.predictions, expected.predictions)
    same(output.label_ids, expected.label_ids)
    if options.get("eval_do_concat_batches") is False:
        assert [len(labels) for labels in output.label_ids] == [4, 4, 2]
    else:
        assert (output.predictions[1]["wide"][8:, 2:] == -100).all()


def test_batches_that_are_not_joined_reach_compute_metrics_as_lists(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def metrics_of(name: str) -> Any:
        def compute(prediction: Any) -> dict[str, Any]:
            seen[name] = tuple(prediction)
            return {"batches": len(prediction.predictions)}

        return compute

    options: dict[str, Any] = {"eval_do_concat_batches": False, "include_for_metrics": ["loss"]}
    rows = regression_rows(6)
    ours = quiet(Regression(), arguments(tmp_path, **options), compute_metrics=metrics_of("ours"))
    assert ours.evaluate(rows)["eval_batches"] == 2
    theirs(Regression(), tmp_path, metrics_of("theirs"), **options).evaluate(rows)
    predictions, labels, losses = seen["ours"]
    same([predictions, labels], list(seen["theirs"][:2]))
    for found, expected in zip(losses, seen["theirs"][2], strict=True):
        np.testing.assert_allclose(found, expected[: len(found)], rtol=1e-6)


def batch_accuracy() -> tuple[Any, list[Any]]:
    """Metrics that add up over batches, and the calls."""
    calls: list[Any] = []

    def compute(prediction: Any, compute_result: bool) -> dict[str, Any]:
        assert isinstance(prediction.predictions, Tensor)
        calls.append((len(prediction.label_ids), compute_result, len(tuple(prediction))))
        right = prediction.predictions.argmax(-1) == prediction.label_ids
        total.append(right)
        return {"accuracy": torch.cat(total).float().mean()} if compute_result else {}

    total: list[Tensor] = []
    return compute, calls


def test_metrics_by_batch_are_those_of_transformers(tmp_path: Path) -> None:
    rows = [{"input_ids": [n % 7 + 1, 2, 3], "labels": n % 3} for n in range(10)]
    options: dict[str, Any] = {"batch_eval_metrics": True, "include_for_metrics": ["loss", "inputs"]}
    compute, calls = batch_accuracy()
    found = quiet(qwen_classifier(), arguments(tmp_path, **options), compute_metrics=compute).evaluate(rows)
    their_compute, their_calls = batch_accuracy()
    expected = theirs(qwen_classifier(), tmp_path, their_compute, **options).evaluate(rows)
    assert calls == their_calls == [(4, False, 4), (4, False, 4), (2, True, 4)]
    assert found["eval_accuracy"] == pytest.approx(expected["eval_accuracy"])
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_logits_are_preprocessed_before_metrics_by_batch(tmp_path: Path) -> None:
    seen: list[Any] = []

    def compute(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append(prediction.predictions.tolist())
        return {}

    args = arguments(tmp_path, batch_eval_metrics=True)
    quiet(
        Regression(), args, compute_metrics=compute, preprocess_logits_for_metrics=lambda logits, labels: 0 * logits
    ).evaluate(regression_rows(6))
    assert seen == [[0.0] * 4, [0.0] * 2]


def test_the_evaluation_on_start_is_no_result_of_the_training(tmp_path: Path) -> None:
    """As in transformers, it is reported and not compared: the best metric is that of a trained step."""
    options: dict[str, Any] = {"eval_on_start": True, "eval_strategy": "epoch", "num_train_epochs": 2}
    options |= {"metric_for_best_model": "loss", "learning_rate": 5.0, "save_strategy": "no"}
    rows = regression_rows(8)
    mine = quiet(Regression(), arguments(tmp_path, **options), rows, eval_dataset=rows)
    their = theirs(Regression(), tmp_path, lr_scheduler_type="constant", **options)
    for trainer in (mine, their):
        trainer.train()
        values = [record["eval_loss"] for record in trainer.state.log_history if "eval_loss" in record]
        assert len(values) == 3
        assert trainer.state.best_metric == min(values[1:]) > values[0]


def test_metrics_by_batch_require_the_parameter_that_asks_for_the_result(tmp_path: Path) -> None:
    trainer = quiet(
        Regression(), arguments(tmp_path, batch_eval_metrics=True), regression_rows(4), compute_metrics=lambda p: {}
    )
    for act in (trainer.train, lambda: trainer.evaluate(regression_rows(4))):
        with pytest.raises(ConfigError, match=r"batch_eval_metrics=True .* must have the parameter compute_result"):
            act()


@pytest.mark.parametrize("name", ["bf16_full_eval", "fp16_full_eval"])
def test_a_full_evaluation_casts_the_weights_and_only_outside_of_training(tmp_path: Path, name: str) -> None:
    seen: list[torch.dtype] = []

    class Seen(TokenModel):
        def logits(self, input_ids: Tensor) -> Tensor:
            seen.append(self.head.weight.dtype)
            return super().logits(input_ids)

    rows = ragged_rows(4)
    args = arguments(tmp_path, eval_strategy="epoch", **{name: True})
    trainer = Trainer(Seen(), args, train_dataset=rows, eval_dataset=rows, default_callbacks=False)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}  # type: ignore[union-attr]
    metrics = trainer.evaluate()
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float16
    assert set(seen) == {dtype}
    expected = theirs(Seen(), tmp_path, **{name: True}).evaluate(rows[:4])
    assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    for key, value in trainer.model.state_dict().items():  # type: ignore[union-attr]
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    seen.clear()
    trainer.train()
    assert set(seen) == {torch.float32}


def test_both_full_evaluations_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bf16_full_eval=True contradicts fp16_full_eval=True"):
        arguments(tmp_path, bf16_full_eval=True, fp16_full_eval=True)


def test_lists_of_objects_are_kept_as_they_are(tmp_path: Path) -> None:
    """As boxes for object detection: one dict for each image, with its own number of boxes."""
    rows = [{"x": row["x"], "labels": [{"boxes": torch.ones(n + 1, 4)}]} for n, row in enumerate(regression_rows(2))]

    class Boxes(Regression):
        def forward(self, x: Tensor, labels: Any = None) -> Any:  # type: ignore[override]
            return {**super().forward(x), "loss": torch.zeros(())}

    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([s["x"] for s in samples]), "labels": [s["labels"][0] for s in samples]}

    args = arguments(tmp_path, eval_use_gather_object=True, eval_do_concat_batches=False, per_device_eval_batch_size=1)
    found = quiet(Boxes(), args, data_collator=collate).predict(rows).label_ids
    assert [[one["boxes"].shape for one in batch] for batch in found] == [[(1, 4)], [(2, 4)]]


def test_the_metrics_have_the_names_of_transformers(tmp_path: Path) -> None:
    """Those of a prediction have the epoch besides, and those of tokens the perplexity."""
    rows = regression_rows(6)

    def compute(prediction: Any) -> dict[str, Any]:
        return {"mae": np.abs(prediction.predictions - prediction.label_ids).mean(), "eval_rows": len(prediction[0])}

    ours = quiet(Regression(), arguments(tmp_path), rows, compute_metrics=compute)
    their = theirs(Regression(), tmp_path, compute, save_strategy="no")
    assert ours.evaluate(rows).keys() == their.evaluate(rows).keys()
    assert ours.predict(rows).metrics.keys() - their.predict(rows).metrics.keys() == {"epoch"}
    found, expected = ours.predict(rows, metric_key_prefix="my").metrics, their.predict(rows, None, "my").metrics
    assert expected.keys() <= found.keys()
    assert found["my_mae"] == pytest.approx(expected["my_mae"], rel=1e-5)
    trained = quiet(Regression(), arguments(tmp_path / "b"), rows, compute_metrics=compute)
    trained.train()
    assert "eval_model_preparation_time" not in trained.evaluate(rows)
    their = theirs(Regression(), tmp_path / "b", compute, save_strategy="no", max_steps=1)
    their.train()
    assert trained.evaluate(rows).keys() == their.evaluate(rows).keys()


def test_the_argument_of_transformers_4_for_inputs_is_named_with_its_replacement() -> None:
    from onstep import TrainingArguments

    with pytest.raises(ConfigError, match=r"Use include_for_metrics=\['inputs'\]"):
        TrainingArguments("out", include_inputs_for_metrics=True)  # type: ignore[call-arg]


def test_losses_alone_are_evaluated_without_the_cost_of_predictions(tmp_path: Path) -> None:
    asked: list[bool] = []

    class Asks(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
            asked.append(return_outputs)
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    for options in ({}, {"compute_metrics": lambda p: {}}):
        args = arguments(tmp_path, prediction_loss_only=bool(options))
        Asks(Regression(), args, default_callbacks=False, **options).evaluate(regression_rows(4))
    assert asked == [False, False]
