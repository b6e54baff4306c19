"""What the ranks of the tests of evaluations run: `job_evaluate(settings)`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from onstep import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from tests.support.small_models import Regression, TokenModel, arguments, quiet, regression_rows


def token_rows() -> list[dict[str, Any]]:
    """Rows of five lengths, in the order of which each batch of two has one length."""
    return [{key: torch.arange(1, length) for key in ("input_ids", "labels")} for length in (3, 3, 6, 6, 5, 5, 4)]


def by_batch() -> tuple[Any, list[Any]]:
    """Metrics that add up over batches, and the calls."""
    calls: list[Any] = []

    def compute(prediction: Any, compute_result: bool) -> dict[str, Any]:
        calls.append([prediction.label_ids.tolist(), compute_result])
        return {"rows": sum(len(labels) for labels, _ in calls)} if compute_result else {}

    return compute, calls


class Doubled(Trainer):
    """Reports twice the loss."""

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: Any, ignore_keys: Any = None) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return 2 * loss, logits, labels


class Words(TokenModel):
    """Generates the first ids of its input, of which each row has as many as its first id says, at most three."""

    config, generation_config = None, None

    def __init__(self) -> None:
        from transformers import GenerationConfig, PretrainedConfig

        super().__init__()
        self.config = PretrainedConfig(pad_token_id=0, is_encoder_decoder=True)  # type: ignore[assignment]
        self.generation_config = GenerationConfig(max_length=2)  # type: ignore[assignment]

    def generate(self, input_ids: Any, labels: Any = None, max_length: int = 0, **others: Any) -> Any:
        return input_ids[:, :max_length]


def job_evaluate(settings: dict[str, Any]) -> None:
    """Evaluate seven samples in the ways of the tests, and write what each gives."""
    here, micro = Path(), settings["micro_batch_size"]
    rows = regression_rows(7)
    compute, calls = by_batch()
    args = arguments(here, per_device_eval_batch_size=micro, batch_eval_metrics=True)
    found: dict[str, Any] = {"metrics": quiet(Regression(), args, compute_metrics=compute).evaluate(rows)}
    found["calls"] = calls
    args = arguments(here, per_device_eval_batch_size=micro)
    found["doubled"] = Doubled(Regression(), args, default_callbacks=False).evaluate(rows)["eval_loss"]
    args = arguments(here, per_device_eval_batch_size=1, eval_do_concat_batches=False)
    found["batches"] = [labels.tolist() for labels in quiet(Regression(), args).predict(rows).label_ids]
    generating = Seq2SeqTrainingArguments(
        "run", use_cpu=True, per_device_eval_batch_size=1, predict_with_generate=True, report_to="none"
    )
    output = Seq2SeqTrainer(Words(), generating, default_callbacks=False).predict(token_rows(), max_length=4)
    found["generated"], found["labels"] = output.predictions.tolist(), output.label_ids.tolist()
    Path(f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
