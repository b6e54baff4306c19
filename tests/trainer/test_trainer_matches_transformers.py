"""The losses of the real `transformers.Trainer`, step for step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.small_models import arguments, causal_rows, losses_of, quiet, qwen, qwen_classifier, regression_rows

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def shared(**options: Any) -> dict[str, Any]:
    """Arguments for both: linear warm-up and decay, clipping, every step logged, no shuffling."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
    }
    return {**values, **options}


def theirs(model: Any, rows: Any, directory: Path, **options: Any) -> list[dict[str, float]]:
    args = transformers.TrainingArguments(
        str(directory / "theirs"), report_to="none", save_strategy="no", disable_tqdm=True, **shared(**options)
    )
    trainer = transformers.Trainer(model, args, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def ours(model: Any, rows: Any, directory: Path, **options: Any) -> list[dict[str, float]]:
    trainer = quiet(model, arguments(directory, **shared(**options)), rows)
    trainer.train()
    assert trainer.state is not None
    return [record for record in trainer.state.log_history if "loss" in record]


def test_a_learning_rate_of_zero_trains_nothing_as_in_transformers(tmp_path: Path) -> None:
    rows = causal_rows(8)
    expected = theirs(qwen(), rows, tmp_path, learning_rate=0.0)
    found = ours(qwen(), rows, tmp_path, learning_rate=0.0)
    assert [one["learning_rate"] for one in found] == [one["learning_rate"] for one in expected] == [0.0] * 8
    assert [one["loss"] for one in found] == pytest.approx([one["loss"] for one in expected], rel=1e-4)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_causal_losses_and_norms_are_those_of_transformers(tmp_path: Path, accumulation: int) -> None:
    """Also where the last step of an epoch has fewer micro-batches: 18 samples are 9 micro-batches of 2.

    Both count the labels that the model trains on: all but the first of each row, and no padding.
    """
    rows = causal_rows(18)
    options = {"gradient_accumulation_steps": accumulation}
    expected = theirs(qwen(), rows, tmp_path, **options)
    found = ours(qwen(), rows, tmp_path, **options)
    assert len(found) == len(expected) == (18 if accumulation == 1 else 6)
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in found] == pytest.approx([r[key] for r in expected], rel=1e-5)
    assert found[-1]["epoch"] == expected[-1]["epoch"] == 2.0
    assert [r["step"] for r in found] == [r["step"] for r in expected]
    assert found[-1]["loss"] < found[0]["loss"], "the run must learn, or equality says little"


def test_evaluation_loss_is_that_of_transformers_where_batches_have_equal_labels(tmp_path: Path) -> None:
    """Hugging Face weights batches by samples, ours by labels: they agree on rows of one length."""
    rows = [row for row in causal_rows(32) if row["attention_mask"].count(1) == 9][:4]
    assert len(rows) == 4
    hf_args = transformers.TrainingArguments(str(tmp_path / "theirs"), report_to="none", **shared())
    expected = transformers.Trainer(qwen(), hf_args, eval_dataset=rows).evaluate()
    found = quiet(qwen(), arguments(tmp_path), eval_dataset=rows).evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


def test_evaluation_loss_is_the_mean_over_all_labels(tmp_path: Path) -> None:
    """Where batches differ in labels we weight by labels, as one big batch would; Hugging Face does not."""
    rows = causal_rows(6)
    metrics = quiet(qwen(), arguments(tmp_path, per_device_eval_batch_size=2), eval_dataset=rows).evaluate()
    model = qwen().double().eval()
    batch = {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
    assert metrics["eval_loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_a_classifier_with_accumulation_is_trained_on_the_mean_over_its_samples(tmp_path: Path) -> None:
    """Hugging Face takes the classifier's loss for a share of the step, which it is not, and adds up the means of the
    micro-batches. The reference is one big batch.
    """
    rows = [{"input_ids": row["input_ids"], "labels": n % 3} for n, row in enumerate(causal_rows(12))]
    whole = ours(qwen_classifier(), rows, tmp_path / "whole", per_device_train_batch_size=4)
    split = ours(
        qwen_classifier(), rows, tmp_path / "split", per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    assert [r["loss"] for r in split] == pytest.approx([r["loss"] for r in whole], rel=1e-4)
    single = theirs(qwen_classifier(), rows, tmp_path, per_device_train_batch_size=4)
    assert [r["loss"] for r in whole] == pytest.approx([r["loss"] for r in single], rel=1e-5)


def test_a_plain_module_is_trained_as_by_transformers(tmp_path: Path) -> None:
    from tests.support.small_models import Regression

    rows, options = regression_rows(), {"gradient_accumulation_steps": 3}
    expected = theirs(Regression(), rows, tmp_path, **options)
    trainer = quiet(Regression(), arguments(tmp_path, **shared(**options)), rows)
    trainer.train()
    assert losses_of(trainer) == pytest.approx([r["loss"] for r in expected], rel=1e-5)
