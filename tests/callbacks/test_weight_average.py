"""Averages of the weights equal torch's `AveragedModel`, survive a resume, and stand in for the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from onstep import Trainer, pretrain
from onstep.callbacks import EMA, WeightAverage
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from tests.support.small_models import Regression, arguments, regression_rows


def train(directory: Path, callback: Any, *callbacks: Any, **options: Any) -> Trainer:
    args = arguments(directory, max_steps=6, learning_rate=0.1, **options)
    torch.manual_seed(0)
    trainer = Trainer(
        Regression(),
        args,
        train_dataset=regression_rows(16),
        eval_dataset=regression_rows(4),
        callbacks=[callback, *callbacks],
        default_callbacks=False,
    )
    trainer.train()
    return trainer


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("callback", "function", "counted"),
    [
        (EMA(decay=0.8), get_ema_multi_avg_fn(0.8), [1, 2, 3, 4, 5, 6]),
        (EMA(decay=0.5, start_step=2, every=2), get_ema_multi_avg_fn(0.5), [4, 6]),
        (WeightAverage(start_step=3), get_swa_multi_avg_fn(), [4, 5, 6]),
    ],
)
def test_the_average_is_that_of_torch(callback: Any, function: Any, counted: list[int], tmp_path: Path) -> None:
    reference = AveragedModel(Regression(), multi_avg_fn=function)

    class Record:
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step in counted:
                reference.update_parameters(model)

    trainer = train(tmp_path, callback, Record())
    assert callback.num_averaged == len(counted)
    assert same(callback.averages, weights_of(reference.module))
    assert same(weights_of(trainer.model), callback.averages), "the model has the average at the end"


def test_evaluations_use_the_average_and_training_does_not(tmp_path: Path) -> None:
    class Look:
        def __init__(self) -> None:
            self.evaluated: list[dict[str, Tensor]] = []
            self.after: list[dict[str, Tensor]] = []

        def on_eval_step_end(self, context: Any) -> None:
            self.evaluated.append(weights_of(context.unwrapped_model))

        def on_eval_end(self, context: Any) -> None:
            self.after.append(weights_of(context.unwrapped_model))

    average, look, plain = EMA(decay=0.9, apply_at_end=False), Look(), Look()
    averaged = train(tmp_path / "averaged", average, look, eval_strategy="steps", eval_steps=6)
    without = train(tmp_path / "plain", plain, eval_strategy="steps", eval_steps=6)
    assert same(look.evaluated[-1], average.averages)
    assert same(look.after[-1], weights_of(averaged.model))
    assert same(weights_of(averaged.model), weights_of(without.model)), "the training is the same"
    assert not same(average.averages, weights_of(without.model))
    assert averaged.state.log_history[-2]["eval_loss"] != without.state.log_history[-2]["eval_loss"]


@pytest.mark.parametrize("kind", [EMA, WeightAverage])
def test_a_resumed_run_continues_the_average(kind: Any, tiny_config: ConfigContainer, tmp_path: Path) -> None:
    tiny_config.train.train_iters, tiny_config.checkpoint.save_interval = 6, 2
    tiny_config.run.output_dir = str(tmp_path)
    tiny_config.validation.eval_interval = 3

    def run(name: str, exit_interval: int | None = None) -> dict[str, Tensor]:
        tiny_config.run.name, tiny_config.train.exit_interval = name, exit_interval
        average = kind()
        try:
            pretrain(tiny_config, callbacks=[average])
        except SystemExit:
            assert exit_interval
        assert average.num_averaged == (exit_interval or 6)
        return dict(average.averages)

    whole = run("whole")
    run("resumed", exit_interval=4)
    assert same(run("resumed"), whole)


@pytest.mark.parametrize(("make", "rule"), [(lambda: EMA(decay=1.0), "decay"), (lambda: EMA(every=0), "every")])
def test_a_value_out_of_range_is_refused(make: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        make()
