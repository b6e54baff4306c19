"""What is not finite is never applied and never hidden."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, JsonLogger, pretrain
from onstep.config import ConfigContainer
from onstep.errors import NonFiniteError
from onstep.training import forward_step
from tests.support.small_runs import RaggedRows, mean_step, run, small_state, split


class Poisoned:
    """A forward step whose loss, or gradient, is NaN in one micro-batch."""

    def __init__(self, call: int, gradient_only: bool) -> None:
        self.call, self.gradient_only, self.calls = call, gradient_only, 0

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        loss, function = forward_step(data_iterator, model)
        self.calls += 1
        if self.calls == self.call:
            if self.gradient_only:
                loss.register_hook(lambda gradient: gradient * float("nan"))
            else:
                loss = loss * float("nan")
        return loss, function


class Watch(Callback):
    def __init__(self) -> None:
        self.sample_ids: list[list[int]] = []
        self.reason: str | None = None
        self.exceptions = 0
        self.untouched = False

    def on_train_step_start(self, context: Any) -> None:
        self.sample_ids = context.sample_ids
        self.weights = [p.detach().clone() for p in context.model[0].parameters()]
        self.moments = [s["exp_avg"].clone() for s in context.optimizer.state.values()]

    def on_exception(self, context: Any) -> None:
        self.exceptions += 1
        same = zip(self.weights, context.model[0].parameters(), strict=True)
        moments = zip(self.moments, [s["exp_avg"] for s in context.optimizer.state.values()], strict=True)
        self.untouched = all(torch.equal(a, b) for pairs in (same, moments) for a, b in pairs)

    def on_run_end(self, context: Any) -> None:
        self.reason = context.reason


@pytest.mark.parametrize("gradient_only", [False, True])
def test_a_nan_is_named_and_not_applied(tiny_config: ConfigContainer, gradient_only: bool) -> None:
    tiny_config.train.micro_batch_size = 2
    watch = Watch()
    with pytest.raises(NonFiniteError) as raised:
        pretrain(tiny_config, Poisoned(call=2 * 3 + 2, gradient_only=gradient_only), callbacks=[watch])
    message = str(raised.value)
    assert "step 4" in message
    if not gradient_only:
        assert "micro-batch 1" in message
        assert str(watch.sample_ids[1]) in message
        assert str(watch.sample_ids[0]) not in message
    else:
        assert str(watch.sample_ids) in message
    assert watch.untouched
    assert (watch.exceptions, watch.reason) == (1, "failed")


def test_neither_log_nor_metrics_log_tell_of_the_refused_step(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    tiny_config.logger.log_interval = 1
    tiny_config.run.name, tiny_config.run.output_dir = "run", str(tmp_path)
    with pytest.raises(NonFiniteError):
        pretrain(tiny_config, Poisoned(call=3, gradient_only=False), callbacks=[JsonLogger()])
    records = json.loads((tmp_path / "run" / "trainer_logs.json").read_text())
    assert [record["global_step"] for record in records if "loss" in record] == [1, 2]
    assert all(math.isfinite(record["loss"]) for record in records if "loss" in record)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["status"], run["step"]) == ("failed", 2)


def test_a_micro_batch_without_labels_is_not_blamed_for_the_nan_of_another() -> None:
    calls: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        loss, function = mean_step(data_iterator, model)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 2 else loss), function

    batches = split(RaggedRows(6, empty=(0, 1)), [2, 2, 2])
    with pytest.raises(NonFiniteError, match="micro-batch 1: loss nan") as raised:
        run(small_state(2, 6, train_iters=1), step=step, data=iter(batches.micro_batches))
    assert "micro-batch 0" not in str(raised.value)


def test_a_mean_that_divides_by_no_labels_itself_is_named() -> None:
    """A sum over a count of 0 has NaN gradients, unlike torch's own mean losses."""

    def step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        kept = batch["labels"].ne(-100)
        return model(**batch) / kept.sum(), lambda loss: (loss + 0 * model.out.bias.sum() / kept.sum(), {})

    batches = split(RaggedRows(4, empty=(2, 3)), [2, 2])
    with pytest.raises(NonFiniteError, match="micro-batch 1: loss nan, no labels in it"):
        run(small_state(train_iters=1), step=step, data=iter(batches.micro_batches))
