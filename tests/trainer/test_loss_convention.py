"""What kind of loss is found in real models and in functions as people write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from onstep.trainer import loss_convention
from onstep.trainer.loss_convention import Labels, shifts_labels
from tests.support.small_models import (
    CountingTokenModel,
    TokenModel,
    arguments,
    causal_rows,
    quiet,
    qwen,
    qwen_classifier,
)

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 23}


def real_models() -> dict[str, tuple[Callable[[], nn.Module], str, bool]]:
    bert = partial(transformers.BertConfig, **SMALL)
    gpt = partial(transformers.GPT2Config, n_embd=16, n_layer=1, n_head=2, vocab_size=23)
    t5 = partial(transformers.T5Config, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=23)
    return {
        "Qwen2ForCausalLM": (qwen, "share", True),
        "GPT2LMHeadModel": (lambda: transformers.GPT2LMHeadModel(gpt()), "share", True),
        "Qwen2ForSequenceClassification": (qwen_classifier, "mean", False),
        "BertForMaskedLM": (lambda: transformers.BertForMaskedLM(bert()), "mean", False),
        "BertForTokenClassification": (lambda: transformers.BertForTokenClassification(bert()), "mean", False),
        "T5ForConditionalGeneration": (lambda: transformers.T5ForConditionalGeneration(t5()), "mean", False),
        "a plain module": (TokenModel, "mean", False),
        "a module that names num_items_in_batch": (CountingTokenModel, "share", False),
        "a compiled module": (lambda: torch.compile(CountingTokenModel(), backend="eager"), "share", False),
    }


@pytest.mark.parametrize("name", real_models())
def test_what_a_model_gives(name: str) -> None:
    make, convention, shifts = real_models()[name]
    model = make()
    assert loss_convention.of_model(model) == convention
    assert shifts_labels(model) is shifts


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "GPT2LMHeadModel"])
def test_a_model_said_to_give_a_share_really_divides_by_the_number(name: str) -> None:
    model = real_models()[name][0]().eval()
    ids = torch.arange(1, 9).unsqueeze(0)
    one, two = (model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(n)).loss for n in (7, 14))
    torch.testing.assert_close(one, model(input_ids=ids, labels=ids).loss)
    torch.testing.assert_close(two, one / 2)


def test_the_labels_of_an_encoder_and_decoder_are_not_shifted() -> None:
    model = qwen()
    model.config.is_encoder_decoder = True
    assert not shifts_labels(model)


def test_a_model_may_state_what_it_gives() -> None:
    model: Any = CountingTokenModel()
    model.accepts_loss_kwargs = False
    assert loss_convention.of_model(model) == "mean"


def reads(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs / num_items_in_batch


def ignores(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.mean()


def takes_keywords(outputs: Any, labels: Any, **kwargs: Any) -> Any:
    return outputs / kwargs["num_items_in_batch"]


def passes_keywords(outputs: Any, labels: Any, **kwargs: Any) -> Any:
    return ignores(outputs, labels, **kwargs)


def nested(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    def divide(value: Any) -> Any:
        return value / num_items_in_batch

    return divide(outputs)


@wraps(reads)
def decorated(*args: Any, **kwargs: Any) -> Any:
    return reads(*args, **kwargs)


class Loss:
    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs / num_items_in_batch

    def method(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.mean()


@pytest.mark.parametrize(
    ("function", "convention"),
    [
        (reads, "share"),
        (ignores, "mean"),
        (takes_keywords, "share"),
        (passes_keywords, "mean"),
        (nested, "share"),
        (decorated, "share"),
        (partial(reads, labels=None), "share"),
        (Loss(), "share"),
        (Loss().method, "mean"),
        (lambda outputs, labels: outputs.mean(), "mean"),
    ],
)
def test_what_a_function_gives(function: Any, convention: str) -> None:
    assert loss_convention.of_function(function) == convention


class Losses:
    """Ways to write a `compute_loss`."""

    accelerator: Any
    args: Any

    def of_trl(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs).sum() / num_items_in_batch
        return loss * (self.accelerator.num_processes // 1)

    def by_a_name(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = model(**inputs).sum() / num_items_in_batch
        ranks = self.args.world_size
        loss *= ranks
        return loss

    def for_another_purpose(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.accelerator.num_processes > 1:
            self.accelerator.wait_for_everyone()
        return 0.5 * model(**inputs).sum() / num_items_in_batch


def test_a_loss_for_gradients_that_are_averaged_over_ranks_is_recognized() -> None:
    assert loss_convention.multiplies_by_ranks(Losses().of_trl)
    assert loss_convention.multiplies_by_ranks(Losses().by_a_name)
    assert not loss_convention.multiplies_by_ranks(Losses().for_another_purpose)
    assert not loss_convention.multiplies_by_ranks(len)


def test_labels_are_counted_as_the_model_sees_them() -> None:
    labels = torch.tensor([[-100, 1, 2, -100], [3, 4, 5, 6]])
    assert Labels().count({"labels": labels}) == 6
    assert Labels(shifted=True).count({"labels": labels}) == 5
    assert Labels(shifted=True).count({"labels": labels[:, None]}) == 5  # (batch, 1, seq), of `return_tensors="pt"`
    assert Labels(shifted=True).count({"labels": labels, "shift_labels": labels}) == 6
    assert Labels().count({"labels": labels[0]}) == 2
    assert Labels().count((labels, labels[:, 0])) == 1
    assert Labels(["a"]).count({"a": labels, "labels": labels.float()}) == 6
    for nothing in ({"labels": labels.float()}, {"input_ids": labels}, (labels,), labels, {"labels": torch.tensor(1)}):
        assert Labels().count(nothing) is None


def test_items_are_counted_for_labels_of_any_type() -> None:
    labels = torch.tensor([[-100, 1, 2, -100], [3, 4, 5, 6]])
    assert Labels().items({"labels": labels}) == Labels().items({"labels": labels.float()}) == 6
    assert Labels(shifted=True).items({"labels": labels}) == 5
    assert Labels().items((labels, labels[:, 0].double())) == 1
    assert Labels(["a"]).items({"a": labels.float()}) == 6
    for nothing in ({"input_ids": labels}, {"labels": [1.0, 2.0]}, (labels,), labels):
        assert Labels().items(nothing) is None


def test_the_convention_is_said_once_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="onstep")
    quiet(qwen(), arguments(tmp_path / "a", max_steps=2), causal_rows(8)).train()
    quiet(TokenModel(), arguments(tmp_path / "b", max_steps=1), causal_rows(8)).train()
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("loss:")]
    assert said == [
        "loss: Qwen2ForCausalLM returns a share of the step's loss",
        "loss: TokenModel returns means of micro-batches, weighted by their labels if they have any, else by their "
        "samples (config_overrides['train.loss_weighting'])",
    ]
