"""The events of a Trainer and the effect of what callbacks answer. Traces are written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onstep import TrainerCallback
from onstep.events import HF_EVENTS
from onstep.events.callback import Callback
from tests.support.small_models import Regression, Stream, arguments, quiet, regression_rows

MICRO = ["on_forward_backward_begin", "on_forward_backward_end"]
UPDATE = ["on_pre_optimizer_step", "on_optimizer_step", "on_train_metrics", "on_step_end"]
STEP = ["on_step_begin", *MICRO, "on_substep_end", *MICRO, *UPDATE]
SHORT_STEP = ["on_step_begin", *MICRO, *UPDATE]
LOG = ["on_log_step", "on_log"]
EVALUATION = ["on_prediction_step", "on_prediction_step", "on_log", "on_evaluate"]
TRAINING = [
    *["on_init_end", "on_train_begin"],
    *["on_epoch_begin", *STEP, *STEP, *LOG, *SHORT_STEP, "on_epoch_end", *EVALUATION],
    *["on_epoch_begin", *STEP, *LOG, *STEP, *SHORT_STEP, *LOG, "on_epoch_end", *EVALUATION],
    *["on_final_metrics", "on_log", "on_save_begin", "on_decision", "on_save", "on_train_end", "on_run_end"],
]
PREDICTION = ["on_prediction_step", "on_predict", "on_run_end"]
DOCUMENTED = HF_EVENTS - {"on_data_init_start", "on_train_step_start", "on_train_step_end"}


def recorder(base: type, trace: list[str]) -> Any:
    """A callback of class `base` that notes the name of every event it is called at."""
    names = {name for name in DOCUMENTED if hasattr(base, name) and "eval_st" not in name and "test_st" not in name}

    def method(name: str) -> Any:
        return lambda self, args, state, control, **kwargs: trace.append(name)

    return type("Recorder", (base,), {name: method(name) for name in names})()


class Steps(TrainerCallback):
    """Notes the step at which each of some events is fired."""

    def __init__(self, *events: str) -> None:
        self.seen: dict[str, list[int]] = {event: [] for event in events}
        for event in events:
            setattr(self, event, self._noting(event))

    def _noting(self, event: str) -> Any:
        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen[event].append(state.global_step)

        return note


def two_epochs(directory: Path, callbacks: list[Any], **options: Any) -> Any:
    """10 samples in micro-batches of 2, two to a step: three steps an epoch, the last one of a single micro-batch."""
    values = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "eval_strategy": "epoch",
        **options,
    }
    args = arguments(directory, **values)
    rows = regression_rows(10)
    return quiet(Regression(), args, rows, eval_dataset=regression_rows(6), callbacks=callbacks)


def test_a_run_with_evaluations_and_a_prediction_fires_every_event_in_order(tmp_path: Path) -> None:
    ours: list[str] = []
    theirs: list[str] = []
    callbacks = [recorder(TrainerCallback, ours), recorder(transformers.TrainerCallback, theirs)]
    trainer = two_epochs(tmp_path, callbacks)
    assert ours == theirs == ["on_init_end"], "fired once, by the constructor"
    trainer.train()
    assert ours == TRAINING
    trainer.predict(regression_rows(4))
    assert ours == TRAINING + PREDICTION
    assert theirs == [event for event in ours if hasattr(transformers.TrainerCallback, event)]
    assert "on_substep_end" in theirs
    assert "on_predict" in theirs


def test_an_evaluation_on_its_own_tells_its_beginning_and_its_end(tmp_path: Path) -> None:
    trace: list[str] = []
    two_epochs(tmp_path, [recorder(TrainerCallback, trace)]).evaluate()
    assert trace == ["on_init_end", *EVALUATION, "on_run_end"]


def test_epochs_are_counted_with_accumulation(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    class Epochs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, round(state.epoch, 4)))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((state.global_step, state.epoch))

    trainer = two_epochs(tmp_path, [Epochs])
    trainer.train()
    assert seen == [(1, 0.3333), (2, 0.6667), (3, 1.0), (3, 1.0), (4, 1.3333), (5, 1.6667), (6, 2.0), (6, 2.0)]
    assert (trainer.state.max_steps, trainer.state.num_train_epochs, trainer.state.epoch_train_steps) == (6, 2, 3)


def by_hand(rows: list[Any], steps: list[list[list[int]]]) -> Regression:
    """Plain SGD over steps of micro-batches of samples, each step the mean over its samples."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for micro_batches in steps:
        optimizer.zero_grad()
        count = sum(map(len, micro_batches))
        for ids in micro_batches:
            batch = {key: torch.stack([rows[i][key] for i in ids]) for key in rows[0]}
            (model(**batch)["loss"] * len(ids) / count).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("drop_last", [False, True])
def test_what_is_left_of_a_window_at_the_end_of_an_epoch_is_used_or_dropped_and_never_leaks(
    tmp_path: Path, drop_last: bool
) -> None:
    epoch = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    rows = regression_rows(10)
    args = arguments(
        tmp_path,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        dataloader_drop_last=drop_last,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
    )
    trainer = quiet(Regression(), args, rows)
    assert trainer.train().global_step == (4 if drop_last else 6)
    expected = by_hand(rows, (epoch[:2] if drop_last else epoch) * 2)
    torch.testing.assert_close(trainer.model.state_dict(), expected.state_dict(), rtol=1e-6, atol=0)


def test_should_epoch_stop_ends_the_epoch_and_the_run_has_its_number_of_epochs(tmp_path: Path) -> None:
    class Impatient(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 1

    steps = Steps("on_epoch_begin", "on_epoch_end", "on_evaluate")
    trainer = two_epochs(tmp_path, [Impatient, steps])
    assert trainer.train().global_step == 4
    assert steps.seen == {"on_epoch_begin": [0, 1], "on_epoch_end": [1, 4], "on_evaluate": [1, 4]}
    assert trainer.state.epoch == 2


def test_an_epoch_that_was_ended_early_is_not_gone_on_with(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Impatient(Callback):
        def on_train_step_start(self, context: Any) -> None:
            seen.append(context.sample_ids)

        def on_step_end(self, context: Any) -> None:
            context.control.end_epoch("enough")

    two_epochs(tmp_path, [Impatient()]).train()
    assert seen == [[[0, 1], [2, 3]], [[0, 1], [2, 3]]]


def test_a_stop_ends_training_and_is_forgotten_when_it_starts_again(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    trainer = two_epochs(tmp_path, [Stop])
    assert trainer.train().global_step == 2
    trainer.remove_callback(Stop)
    assert trainer.train().global_step == 6
    assert trainer.train().global_step == 6


def test_the_final_metrics_are_logged_once_before_the_end_and_returned(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Final(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if "eval_loss" not in logs:
                calls.append(dict(logs))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            calls.append("end")

    trainer = two_epochs(tmp_path, [Final])
    output = trainer.train()
    assert calls[-1] == "end"
    assert [("train_runtime" in record) for record in calls[:-1]] == [False, False, False, True]
    assert calls[-2].items() <= {**output.metrics, "step": calls[-2]["step"]}.items()
    logged = [record["loss"] for record in calls[:3]]
    assert output.training_loss == output.metrics["train_loss"] == pytest.approx(sum(logged) / 3)
    assert output.global_step == 6


def test_log_history_has_every_record_with_its_step(tmp_path: Path) -> None:
    trainer = two_epochs(tmp_path, [])
    trainer.train()
    history = [(record["step"], "loss" in record, "eval_loss" in record) for record in trainer.state.log_history]
    log, evaluation, final = (True, False), (False, True), (False, False)
    assert history == [(2, *log), (3, *evaluation), (4, *log), (6, *log), (6, *evaluation), (6, *final)]


@pytest.mark.parametrize(
    ("options", "logs", "evaluations"),
    [
        ({"eval_strategy": "no", "logging_steps": 4}, [4], []),
        ({"eval_strategy": "no", "logging_strategy": "no"}, [], []),
        ({"eval_strategy": "no", "logging_strategy": "epoch"}, [3, 6], []),
        ({"eval_strategy": "no", "logging_first_step": True}, [1, 2, 4, 6], []),
        ({"eval_strategy": "no", "logging_steps": 0.5}, [3, 6], []),
        ({"eval_strategy": "steps", "eval_steps": 2}, [2, 4, 6], [2, 4, 6]),
        ({"eval_strategy": "steps", "eval_steps": 4}, [2, 4, 6], [4, 6]),  # and at the last step
        ({"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3}, [2, 4, 6], [4, 6]),
        ({"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 9}, [2, 4, 6], []),
        ({"eval_strategy": "epoch", "eval_delay": 2}, [2, 4, 6], [6]),
        ({"eval_strategy": "epoch", "eval_on_start": True}, [2, 4, 6], [0, 3, 6]),
        ({"eval_strategy": "epoch", "max_steps": 4}, [2, 4], [3, 4]),
    ],
)
def test_logs_and_evaluations_come_when_the_arguments_say(
    tmp_path: Path, options: dict[str, Any], logs: list[int], evaluations: list[int]
) -> None:
    steps = Steps("on_log_step", "on_evaluate")
    two_epochs(tmp_path, [steps], **options).train()
    assert steps.seen == {"on_log_step": logs, "on_evaluate": evaluations}


def test_evaluations_come_where_transformers_has_them(tmp_path: Path) -> None:
    """The last step is evaluated too where it is not due, as in transformers 5."""
    seen: list[int] = []

    class Seen(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.global_step)

    options = {"eval_strategy": "steps", "eval_steps": 4, "num_train_epochs": 2, "per_device_train_batch_size": 2}
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"), report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, **options
    )
    trainer = transformers.Trainer(
        Regression(), args, train_dataset=regression_rows(6), eval_dataset=regression_rows(4), callbacks=[Seen()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    expected, seen = seen[:], []
    own = arguments(tmp_path, **options)
    quiet(Regression(), own, regression_rows(6), eval_dataset=regression_rows(4), callbacks=[Seen()]).train()
    assert seen == expected == [4, 6]


def test_what_is_due_can_be_vetoed_and_more_can_be_asked(tmp_path: Path) -> None:
    class Chooses(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_log = state.global_step == 5
            return control

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = state.global_step == 3

    steps = Steps("on_log_step", "on_evaluate")
    two_epochs(tmp_path, [Chooses, steps]).train()
    assert steps.seen == {"on_log_step": [5], "on_evaluate": [3]}


def test_an_aborted_run_logs_and_evaluates_nothing_more(tmp_path: Path) -> None:
    class Abort(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_abort_without_save = state.global_step == 2

    steps = Steps("on_log", "on_evaluate", "on_train_end")
    trainer = two_epochs(tmp_path, [Abort, steps], config_overrides=None)
    trainer.train()
    assert steps.seen == {"on_log": [], "on_evaluate": [], "on_train_end": [2]}
    assert not (tmp_path / "run" / "model").exists()


def test_the_real_early_stopping_stops_at_the_second_evaluation_that_is_no_better(tmp_path: Path) -> None:
    """The best metric is taken up after on_evaluate: the callback compares with the best of the evaluations before."""
    script = iter([5.0, 4.0, 4.5, 4.4, 1.0])
    best: list[Any] = []

    class Best(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            best.append(state.best_metric)

    trainer = quiet(
        Regression(),
        arguments(
            tmp_path, num_train_epochs=5, eval_strategy="epoch", metric_for_best_model="score", greater_is_better=False
        ),
        regression_rows(4),
        eval_dataset=regression_rows(4),
        compute_metrics=lambda prediction: {"score": next(script)},
        callbacks=[Best, transformers.EarlyStoppingCallback(early_stopping_patience=2)],
    )
    assert trainer.train().global_step == 4
    assert best == [None, 5.0, 4.0, 4.0]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (4.0, 2)


def test_a_callback_may_evaluate_and_predict_while_training(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Evaluates(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, trainer: Any, model: Any, **kwargs: Any) -> None:
            metrics = trainer.evaluate(regression_rows(3), metric_key_prefix="extra")
            predictions = trainer.predict(regression_rows(5)).predictions
            seen.append((state.global_step, metrics["extra_loss"], predictions.shape, model.training))

    steps = Steps("on_init_end", "on_evaluate", "on_predict", "on_run_end", "on_train_end")
    trainer = two_epochs(tmp_path, [Evaluates, steps], eval_strategy="no")
    assert trainer.train().global_step == 6
    assert [(step, shape, training) for step, _, shape, training in seen] == [(3, (5,), True), (6, (5,), True)]
    assert seen[1][1] < seen[0][1], "the model that is being trained is evaluated"
    assert steps.seen == {
        "on_init_end": [0],
        "on_evaluate": [3, 6],
        "on_predict": [3, 6],
        "on_run_end": [6],
        "on_train_end": [6],
    }


def test_an_evaluation_that_fails_inside_a_callback_ends_nothing_where_the_callback_handles_it(tmp_path: Path) -> None:
    class Broken(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any, **kwargs: Any) -> None:
            with pytest.raises(RuntimeError):
                trainer.evaluate([{"x": torch.ones(7), "labels": torch.ones(())}])

    steps = Steps("on_exception", "on_train_end", "on_run_end")
    assert two_epochs(tmp_path, [Broken, steps]).train().global_step == 6
    assert steps.seen == {"on_exception": [], "on_train_end": [6], "on_run_end": [6]}


def test_a_callback_may_not_train_while_training(tmp_path: Path) -> None:
    class Nested(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any, **kwargs: Any) -> None:
            trainer.train()

    with pytest.raises(ValueError, match="may evaluate, but not train"):
        two_epochs(tmp_path, [Nested]).train()


def test_an_error_in_a_step_is_fired_once_and_the_trainer_can_continue(tmp_path: Path) -> None:
    class Once(TrainerCallback):
        failed = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2 and not self.failed:
                self.failed = True
                raise ZeroDivisionError("once")

    steps = Steps("on_exception", "on_train_end", "on_run_end")
    trainer = two_epochs(tmp_path, [Once(), steps])
    with pytest.raises(ZeroDivisionError, match="once"):
        trainer.train()
    assert steps.seen == {"on_exception": [2], "on_train_end": [2], "on_run_end": [2]}
    assert trainer.train().global_step == 6


def test_a_stream_without_a_length_starts_again_until_it_has_its_steps(tmp_path: Path) -> None:
    steps = Steps("on_epoch_begin", "on_step_end")
    args = arguments(tmp_path, max_steps=7, per_device_train_batch_size=2)
    trainer = quiet(Regression(), args, Stream(regression_rows(6)), callbacks=[steps])
    assert trainer.train().global_step == 7
    assert steps.seen == {"on_epoch_begin": [0, 3, 6], "on_step_end": [1, 2, 3, 4, 5, 6, 7]}


def test_a_trainer_logs_records_of_its_users_own(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, trainer: Any, **kwargs: Any) -> None:
            calls.append(logs)

        def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.log({"temperature": 0.5})

    trainer = two_epochs(tmp_path, [Tracker], eval_strategy="no", logging_strategy="no")
    trainer.train()
    assert calls[0] == {"epoch": pytest.approx(2 / 3), "temperature": 0.5}
    assert trainer.state.log_history[0] == {**calls[0], "step": 2}
    trainer.log({"temperature": 1.0})
    assert trainer.state.log_history[-1] == {"epoch": 2.0, "temperature": 1.0, "step": 6}
