"""When an evaluation metric has stopped improving, and what the run does then."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, TrainerCallback, pretrain
from onstep.callbacks.early_stopping import EarlyStopping
from onstep.callbacks.textgen_callback import TextgenCallback
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.events import Control, TrainerControl
from tests.support.small_models import Regression, arguments, quiet, regression_rows


class Run:
    """Tells one EarlyStopping what a loop would, an evaluation each 10 steps."""

    def __init__(self, make_state: Any, callback: EarlyStopping, step: int = 0) -> None:
        self.make_state, self.callback, self.step = make_state, callback, step
        callback.on_train_begin(None, make_state(step=step), Control())

    def evaluate(self, *values: float, name: str = "eval_loss") -> list[int]:
        """The steps at which it asks for the end."""
        found = []
        for value in values:
            self.step += 10
            control = Control()
            metrics = {name: value, "epoch": 1.0}
            self.callback.on_evaluate(None, self.make_state(step=self.step), control, metrics=metrics)
            if control.should_training_stop:
                found.append(self.step)
        return found


@pytest.fixture
def start(make_state: Any) -> Any:
    return lambda callback, step=0: Run(make_state, callback, step)


def test_it_ends_after_patience_evaluations_without_improvement(start: Any) -> None:
    callback = EarlyStopping()
    assert start(callback).evaluate(3.0, 2.0, 2.0, 2.5, 1.9, 1.9, 2.0, 3.0) == [80]
    assert (callback.best, callback.best_step, callback.wait_count) == (1.9, 50, 3)


def test_patience_of_one_ends_at_the_first(start: Any) -> None:
    assert start(EarlyStopping(patience=1)).evaluate(3.0, 2.0, 2.0) == [30]


def test_an_improvement_must_be_larger_than_min_delta(start: Any) -> None:
    assert start(EarlyStopping(patience=2, min_delta=0.1)).evaluate(2.0, 1.95, 1.91) == [30]
    assert start(EarlyStopping(patience=2, min_delta=0.1)).evaluate(2.0, 1.95, 1.89) == []


def test_mode_max_wants_it_to_rise(start: Any) -> None:
    run = start(EarlyStopping("accuracy", patience=2, mode="max"))
    assert run.evaluate(0.5, 0.6, 0.6, 0.55, name="eval_accuracy") == [40]


@pytest.mark.parametrize(("mode", "values"), [("min", [3.0, 1.5]), ("max", [1.0, 1.5])])
def test_a_value_that_is_good_enough_ends_at_once(start: Any, mode: Any, values: list[float]) -> None:
    assert start(EarlyStopping(mode=mode, stop_at=1.5)).evaluate(*values) == [20]


def test_nan_ends_at_once_or_is_no_improvement(start: Any) -> None:
    assert start(EarlyStopping()).evaluate(3.0, math.nan) == [20]
    patient = EarlyStopping(patience=3, check_finite=False)
    assert start(patient).evaluate(math.nan, 3.0, math.nan, -math.inf, math.nan) == [50]
    assert patient.best == 3.0
    assert start(EarlyStopping(patience=2, check_finite=False)).evaluate(math.nan, math.nan) == [20]


def test_a_metric_that_is_not_there_is_an_error_with_the_nearest_name(start: Any) -> None:
    with pytest.raises(ConfigError, match=r"'eval_los'.*Did you mean 'eval_loss'\? It has: eval_loss, epoch"):
        start(EarlyStopping("eval_los")).evaluate(2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "up"}, "mode must be min"),
        ({"patience": 0}, "patience must be"),
        ({"min_delta": -1}, "min_delta must be a number >= 0, got -1"),
        ({"min_delta": "0"}, "min_delta must be a number >= 0, got '0'"),
        ({"stop_at": "x"}, "stop_at must be a number, got 'x'"),
        ({"stop_at": math.nan}, "stop_at must be a number, got nan"),
        ({"metric": ""}, "metric must be the name of a metric, got ''"),
        ({"metric": 3}, "metric must be the name of a metric, got 3"),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EarlyStopping(**arguments)


def test_a_continued_run_keeps_its_patience_and_a_new_one_begins_anew(start: Any) -> None:
    callback = EarlyStopping(patience=3)
    start(callback).evaluate(1.0, 2.0, 2.0)
    saved = json.loads(json.dumps(callback.state_dict()))
    continued = EarlyStopping(patience=3)
    continued.load_state_dict(saved)
    assert start(continued, 30).evaluate(2.0) == [40]
    assert start(callback).evaluate(9.0, 8.0) == []
    assert callback.best == 8.0


def test_evaluations_outside_training_do_not_count(make_state: Any) -> None:
    callback = EarlyStopping(patience=1)
    callback.on_evaluate(None, make_state(), TrainerControl(), metrics={"test_loss": 1.0})
    callback.on_train_begin(None, make_state(), TrainerControl())
    callback.on_train_end(None, make_state(step=8), TrainerControl())
    callback.on_evaluate(None, make_state(step=8), TrainerControl(), metrics={"test_loss": 1.0})
    assert callback.best is None


def test_a_control_of_hugging_faces_kind_gets_the_flag(make_state: Any) -> None:
    callback, control = EarlyStopping(stop_at=5.0), TrainerControl()
    callback.on_train_begin(None, make_state(), control)
    callback.on_evaluate(None, make_state(step=1), control, metrics={"eval_loss": 1.0})
    assert control.should_training_stop


class Worsening(TrainerCallback):
    """Breaks the model a little more before each evaluation, from a step on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.first:
            for parameter in kwargs["model"].parameters():
                parameter.data.mul_(-8.0)


def test_a_run_ends_by_itself_and_says_why(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    config = tiny_config
    config.run.name, config.run.output_dir = "run", str(tmp_path)
    config.train.train_iters, config.validation.eval_interval = 30, 2
    callback, manager = EarlyStopping(patience=2), CallbackManager()
    manager.add([Worsening(5), callback])
    pretrain(config, callbacks=manager)
    decisions = [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    (stop,) = [one for one in decisions if one["flag"] == "should_training_stop"]
    assert (stop["step"], stop["author"]) == (8, "EarlyStopping")
    assert "has not improved on" in stop["reason"]
    assert callback.best_step == 4


@pytest.mark.parametrize(("strategy", "is_named"), [("no", True), ("epoch", False)])
def test_callbacks_that_wait_for_an_evaluation_in_vain_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: str, is_named: bool
) -> None:
    rows, callbacks = regression_rows(4), [EarlyStopping(), TextgenCallback(None, ["a"])]
    args = arguments(tmp_path, eval_strategy=strategy, max_steps=1)
    quiet(Regression(), args, rows, eval_dataset=rows, callbacks=callbacks).train()
    assert ("EarlyStopping never stops: there is no evaluation during training" in caplog.text) is is_named
    assert ("no text will be generated: there is no evaluation to follow" in caplog.text) is is_named
