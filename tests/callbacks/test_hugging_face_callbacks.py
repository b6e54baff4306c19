"""The callbacks of `transformers.trainer_callback` beside Onstep's of the same name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from transformers import trainer_callback as theirs

import onstep.trainer_callback
from onstep import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerControl,
    TrainerState,
)
from onstep.errors import ConfigError
from tests.support.small_models import Regression, quiet, regression_rows
from tests.support.small_models import arguments as small_arguments


def arguments(**values):
    defaults = {
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "eval_strategy": "steps",
        "load_best_model_at_end": True,
        "logging_strategy": "steps",
        "logging_first_step": True,
        "save_strategy": "steps",
        "eval_delay": 0,
        "disable_tqdm": True,
    }
    return SimpleNamespace(**{**defaults, **values})


def test_every_name_of_the_module_of_transformers_is_there():
    own = [
        name for name, value in vars(theirs).items() if isinstance(value, type) and value.__module__ == theirs.__name__
    ]

    assert sorted(own) == sorted(onstep.trainer_callback.__all__)
    assert [name for name in own if getattr(onstep.trainer_callback, name) is not getattr(onstep, name)] == []


@pytest.mark.parametrize(("threshold", "greater"), [(0.0, False), (0.3, False), (0.3, True)])
def test_early_stopping_counts_as_that_of_transformers(threshold, greater):
    def counts(cls, state_class, control_class):
        args, callback = arguments(greater_is_better=greater), cls(3, threshold)
        state, control, seen = state_class(), control_class(), []
        callback.on_train_begin(args, state, control)
        for value in (3.0, 2.0, 2.5, 1.9, 1.5, 4.0, 4.1, 5.0):
            callback.on_evaluate(args, state, control, {"eval_loss": value})
            seen.append((callback.early_stopping_patience_counter, control.should_training_stop))
            best = max if greater else min
            state.best_metric = value if state.best_metric is None else best(value, state.best_metric)
        return seen, callback.state(), cls.from_state(callback.state()).early_stopping_patience_counter

    ours = counts(EarlyStoppingCallback, TrainerState, TrainerControl)

    assert ours == counts(theirs.EarlyStoppingCallback, theirs.TrainerState, theirs.TrainerControl)
    assert any(count for count, _ in ours[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metric_for_best_model": None}, "requires metric_for_best_model in TrainingArguments"),
        ({"eval_strategy": "no"}, "requires eval_strategy='steps' or 'epoch'"),
    ],
)
def test_early_stopping_says_which_argument_it_lacks(values, message):
    with pytest.raises(ConfigError, match=message):
        EarlyStoppingCallback().on_train_begin(arguments(**values), TrainerState(), TrainerControl())


def test_early_stopping_names_what_it_cannot_see(caplog):
    callback = EarlyStoppingCallback()
    with caplog.at_level(logging.WARNING):
        callback.on_train_begin(arguments(load_best_model_at_end=False), TrainerState(), TrainerControl())
        callback.on_evaluate(arguments(), TrainerState(), TrainerControl(), {"eval_accuracy": 1.0})

    assert "the last weights are kept, not the best" in caplog.text
    assert "the evaluation has no eval_loss, so it is not counted" in caplog.text


def stopping_trainer(directory, metric):
    rows = regression_rows()
    args = small_arguments(directory, eval_strategy="epoch", num_train_epochs=2, metric_for_best_model=metric)
    sets = {"one": rows, "two": rows}
    return quiet(Regression(), args, rows, eval_dataset=sets, callbacks=[EarlyStoppingCallback()])


def test_in_a_trainer_a_missing_metric_is_an_error_but_for_a_set_of_several(tmp_path, caplog):
    stopping_trainer(tmp_path / "there", "one_loss").train()
    assert "the evaluation has no eval_one_loss, so it is not counted" in caplog.text
    with pytest.raises(ConfigError, match=r"metric_for_best_model='f1' is not a metric .* has .*eval_one_loss"):
        stopping_trainer(tmp_path / "missing", "f1").train()


def test_the_printer_prints_what_that_of_transformers_prints(capsys):
    printed = []
    for cls in (PrinterCallback, theirs.PrinterCallback):
        for zero in (True, False):
            logs = {"loss": 0.123456, "total_flos": 1e9, "epoch": 1, "note": "text"}
            cls().on_log(arguments(), TrainerState(is_local_process_zero=zero), TrainerControl(), logs=logs)
            printed.append(capsys.readouterr().out)

    assert printed[:2] == printed[2:] == ["{'loss': '0.1235', 'epoch': 1, 'note': 'text'}\n", ""]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"eval_delay": 4},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"},
        {"eval_strategy": "no", "save_strategy": "no", "logging_strategy": "no", "logging_first_step": False},
    ],
)
def test_the_default_flow_sets_the_flags_of_that_of_transformers(values):
    def flags(cls, control_class):
        seen = []
        for step in range(1, 8):
            state = TrainerState(global_step=step, epoch=step, max_steps=7, logging_steps=2, eval_steps=3, save_steps=4)
            for event in ("on_step_end", "on_epoch_end"):
                seen.append(getattr(cls(), event)(arguments(**values), state, control_class()).state())
        return seen

    assert flags(DefaultFlowCallback, TrainerControl) == flags(theirs.DefaultFlowCallback, theirs.TrainerControl)


def test_a_subclass_may_use_or_replace_the_bars(capsys):
    class Bar:
        def __init__(self):
            self.story = []

        def write(self, text):
            self.story.append(text)

        def update(self, steps):
            self.story.append(steps)

        def close(self):
            self.story.append("closed")

    class Mine(ProgressCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            if args.replaces:
                self.training_bar = Bar()

        def on_step_end(self, args, state, control, **kwargs):
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.training_bar.write(str(logs))

    def run(**values):
        callback, state, control = Mine(max_str_len=5), TrainerState(), TrainerControl()
        callback.on_train_begin(arguments(**values), state, control)
        state.global_step = 2
        callback.on_step_end(arguments(), state, control)
        callback.on_log(arguments(), state, control, {"loss": 1.0})
        bar = callback.training_bar
        callback.on_train_end(arguments(), state, control)
        return bar, callback.training_bar

    assert run(replaces=False)[1] is None
    assert capsys.readouterr().out == "{'loss': 1.0}\n"
    bar, after = run(replaces=True)
    assert (bar.story, after) == ([2, "{'loss': 1.0}", "closed"], None)


def test_the_length_of_texts_is_not_taken_for_the_switch_of_the_bars():
    with pytest.raises(ConfigError, match=r"use_tqdm must be True, False or None, got 200; pass a length by name"):
        ProgressCallback(200)


def test_a_long_text_is_not_printed(capsys):
    callback, state = ProgressCallback(use_tqdm=False, max_str_len=5), TrainerState()
    callback.on_evaluate(arguments(), state, TrainerControl(), {"eval_text": "abcdefgh"})

    assert "text [text of 8 characters; max_str_len is 5]" in capsys.readouterr().out
