"""What a step of the Trainer asks anew: nothing that was known when the run began."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onstep.trainer
from onstep import Callback, Trainer
from onstep.data import default_data_collator
from onstep.trainer.dataloaders import ColumnFilter
from tests.support.small_models import (
    CountingTokenModel,
    Regression,
    TokenModel,
    arguments,
    quiet,
    ragged_rows,
    regression_rows,
)

STEPS = 8


class Profile(Callback):
    """Counts, from the fourth step on, the calls into the Trainer's package and into `inspect`."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.steps = 0

    def on_step_end(self, context: Any) -> None:
        if context.step == 3:
            sys.setprofile(self._note)
        self.steps = context.step - 3

    def on_train_end(self, context: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(onstep.trainer.__path__[0]):
            self.calls[f"{Path(code.co_filename).name}:{code.co_name}"] += 1
        elif code.co_filename == inspect.__file__:
            self.calls["inspect"] += 1


def mean_of_squares(outputs: Any, labels: Any) -> Tensor:
    return (outputs["logits"] - labels).square().mean()


@pytest.mark.parametrize(
    ("make_model", "rows", "given"),
    [
        pytest.param(Regression, regression_rows, {}, id="mean"),
        pytest.param(TokenModel, ragged_rows, {}, id="mean of tokens"),
        pytest.param(CountingTokenModel, ragged_rows, {}, id="share"),
        pytest.param(Regression, regression_rows, {"compute_loss_func": mean_of_squares}, id="compute_loss_func"),
    ],
)
def test_a_step_makes_few_calls_and_looks_at_no_signature(
    make_model: Callable[[], Any], rows: Callable[[int], Any], given: Any, tmp_path: Path
) -> None:
    profile = Profile()
    args = arguments(tmp_path, max_steps=STEPS, per_device_train_batch_size=1, logging_strategy="no")

    quiet(make_model(), args, rows(STEPS), callbacks=[profile], **given).train()

    assert profile.steps == STEPS - 3
    assert profile.calls["inspect"] == 0
    in_steps = {name: count for name, count in profile.calls.items() if count >= profile.steps}
    assert sum(in_steps.values()) <= 15 * profile.steps, in_steps


def test_a_step_without_a_label_divides_by_one(tmp_path: Path) -> None:
    given = []

    class Notes(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            given.append(int(num_items_in_batch))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    labels = [[3, -100, 4], [-100, -100, -100]]
    rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor(one)} for one in labels]
    args = arguments(tmp_path, max_steps=2, per_device_train_batch_size=1)

    Notes(CountingTokenModel(), args, train_dataset=rows, default_callbacks=False).train()

    assert given == [2, 1]


def test_another_model_and_another_function_are_asked_anew(tmp_path: Path) -> None:
    [row] = ragged_rows(1)
    inputs = {name: torch.as_tensor(value)[None] for name, value in row.items()}
    counts, plain = CountingTokenModel(), TokenModel()
    trainer = quiet(counts, arguments(tmp_path), ragged_rows(1))

    share = trainer.compute_loss(counts, inputs, num_items_in_batch=1000)
    assert share < trainer.compute_loss(counts, inputs) / 10
    assert trainer.compute_loss(plain, inputs, num_items_in_batch=1000).equal(trainer.compute_loss(plain, inputs))
    model, [row] = Regression(), regression_rows(1)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: num_items_in_batch
    assert trainer.compute_loss(model, row, num_items_in_batch=7) == 7
    trainer.compute_loss_func = lambda outputs, labels: "a mean"
    assert trainer.compute_loss(model, row, num_items_in_batch=7) == "a mean"


def test_a_collator_may_change_its_samples_where_the_model_takes_all_columns() -> None:
    def popping(samples: Any) -> Any:
        for sample in samples:
            sample.pop("labels")
        return default_data_collator(samples)

    rows = regression_rows(2)

    assert list(ColumnFilter(popping, Regression())(rows)) == ["x"]
    assert all("labels" in row for row in rows)
