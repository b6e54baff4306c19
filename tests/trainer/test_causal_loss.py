"""Causal models of `transformers` compute their own loss in chunks, with the numbers that they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.models import vocabulary_loss
from onstep.models.hf.causal_loss import causal_loss_in_chunks
from onstep.trainer.computing import label_smoothing
from onstep.trainer.computing.label_smoothing import LabelSmoother
from tests.support.live_bytes import LiveBytes
from tests.support.small_models import VOCABULARY, arguments, causal_rows, losses_of, quiet, qwen

ROW = 4 * VOCABULARY


def loss_and_gradients(model: Any, chunked: bool | None, **given: Any) -> list[Tensor]:
    config = ModelConfig()
    config.chunked_loss = chunked
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = given.pop("labels", ids.masked_fill(ids % 5 == 0, -100))
    with causal_loss_in_chunks(model, config):
        loss = model(input_ids=ids, labels=labels, **given).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
def test_losses_and_gradients_are_those_of_transformers(items: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 4 * ROW)
    model = qwen()
    plain, ours = (loss_and_gradients(model, chunked, num_items_in_batch=items) for chunked in (False, True))
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in zip(ours, plain, strict=True))
    assert "_loss_function" not in vars(model)


def test_the_mean_over_no_labels_is_nan_with_gradients_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 4 * ROW)
    loss, *gradients = loss_and_gradients(qwen(), True, labels=torch.full((3, 9), -100))
    assert loss.isnan()
    assert all((one == 0).all() for one in gradients)


def test_a_small_vocabulary_and_a_function_of_the_users_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 4 * ROW)
    model = qwen()
    plain, ours = (loss_and_gradients(model, chunked) for chunked in (False, None))
    assert all(map(torch.equal, plain, ours))
    calls: list[int] = []
    own = model.loss_function

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    model.loss_function = counting
    loss_and_gradients(model, True)
    assert calls == [1]
    assert model.loss_function is counting


@pytest.mark.parametrize("is_training", [True, False])
def test_in_bfloat16_no_float32_copy_of_all_logits_exists(is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    vocabulary, tokens = vocabulary_loss.LARGE_VOCABULARY, 64
    logits = 4 * vocabulary * tokens
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", logits // 16)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(0, vocabulary, (1, tokens))
    found = {}
    for chunked in (False, None):
        options = ModelConfig()
        options.chunked_loss = chunked
        with causal_loss_in_chunks(model, options), torch.set_grad_enabled(is_training), LiveBytes() as memory:
            loss = model(input_ids=ids, labels=ids).loss
            if is_training:
                loss.backward()
            del loss
        model.zero_grad()
        found[chunked] = memory
    assert found[False].largest == logits
    whole = logits // 2  # the model's own, in bfloat16
    assert found[None].largest < whole if is_training else found[None].largest == whole
    assert found[False].peak >= (2.9 if is_training else 2) * logits
    assert found[None].peak <= 0.8 * logits


def run(directory: Path, chunked: bool) -> tuple[list[float], list[float]]:
    overrides = {"run.save_weights": False, "model.chunked_loss": chunked}
    args = arguments(directory, logging_steps=1, eval_strategy="steps", eval_steps=2, config_overrides=overrides)
    trainer = quiet(qwen(), args, causal_rows(), eval_dataset=causal_rows(6))
    trainer.train()
    assert trainer.state is not None
    return losses_of(trainer), [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]


def test_a_trainer_trains_and_evaluates_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(tmp_path / "plain", False)
    monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 4 * ROW)
    calls: list[int] = []
    for kind in (vocabulary_loss._LogitsCrossEntropy, vocabulary_loss._LinearCrossEntropy):
        real = kind.apply
        monkeypatch.setattr(kind, "apply", lambda *given, real=real: calls.append(1) or real(*given))
    ours = run(tmp_path / "ours", True)
    assert len(calls) > 4
    for one, other in zip(ours, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("shifts", [True, False])
@pytest.mark.parametrize("items", [None, 5])
def test_smoothed_losses_in_chunks_are_the_plain_ones(
    shifts: bool, items: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(3, 9, VOCABULARY, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    labels[:, ::4] = -100
    found = []
    for least in (VOCABULARY + 1, VOCABULARY):
        monkeypatch.setattr(label_smoothing, "LARGE_VOCABULARY", least)
        monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", 4 * ROW)
        loss = LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=shifts, num_items_in_batch=items)
        found.append((loss.detach(), *torch.autograd.grad(loss, [logits])))
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("is_training", [True, False])
def test_a_smoothed_loss_normalizes_one_chunk_at_a_time(is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, tokens = vocabulary_loss.LARGE_VOCABULARY, 64
    size = 4 * vocabulary * tokens
    logits = torch.randn(1, tokens, vocabulary, requires_grad=is_training)
    labels = torch.randint(0, vocabulary, (1, tokens))
    peaks = []
    for chunk_bytes in (size, size // 16):
        monkeypatch.setattr(vocabulary_loss, "CHUNK_BYTES", chunk_bytes)
        logits.grad = None
        with LiveBytes() as memory:
            loss = LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=True)
            if is_training:
                loss.backward()
            del loss
        peaks.append(memory.peak / size)
    assert peaks[0] >= (3.0 if is_training else 1.9)
    assert peaks[1] <= (2.2 if is_training else 0.3), peaks
