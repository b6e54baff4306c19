"""The real callbacks of `transformers` run here as they are."""

from __future__ import annotations

import inspect

import pytest

from onstep.events import CallbackManager, RunInfo, TrainerCallback

transformers = pytest.importorskip("transformers")


@pytest.fixture
def args(tmp_path):
    return transformers.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        logging_steps=2,
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=4,
        load_best_model_at_end=False,
        metric_for_best_model="loss",
        greater_is_better=False,
    )


@pytest.fixture
def training(run, args):
    """A run of 10 steps over 5 to an epoch."""
    run.args = args
    run.info = RunInfo(max_steps=10, num_train_epochs=2, steps_per_epoch=5, logging_steps=2, eval_steps=3, save_steps=4)
    return run


def registered(*callbacks):
    manager = CallbackManager()
    manager.add(list(callbacks))
    return manager


def test_a_subclass_of_the_real_base_class_is_called_and_brings_only_what_it_overrides(training, notify):
    class Mine(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.got = (args, state.global_step, model, set(kwargs))
            control.should_save = True

    mine = Mine()
    manager = registered(mine)
    training.train_state.step = 4
    control = notify(manager, "on_step_end", model=["chunk"]).control

    assert mine.got == (
        *(training.args, 4, "chunk"),
        {
            *("processing_class", "tokenizer", "optimizer", "lr_scheduler"),
            *("train_dataloader", "eval_dataloader", "trainer"),
        },
    )
    assert [event for event in manager.events if manager.has_callbacks(event)] == ["on_step_end"]
    assert [(request.flag, request.author) for request in control.requests] == [("should_save", "Mine")]


def test_star_arguments_get_the_first_three_by_position_as_in_transformers(training, notify):
    class Mine(transformers.TrainerCallback):
        def on_log(self, *args, **kwargs):
            self.got = (*args, kwargs["logs"])

    mine = Mine()
    context = notify(registered(mine), "on_log", logs={"loss": 1.0})

    assert mine.got == (training.args, mine.got[1], context.control, {"loss": 1.0})


def test_a_returned_control_of_transformers_is_adopted(training, notify):
    class Mine(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return transformers.TrainerControl(should_evaluate=True)

    control = notify(registered(Mine()), "on_step_end").control

    assert control.should_evaluate is True
    assert control.requests[0].author == "Mine"


def test_the_base_class_alone_brings_nothing_and_warns_of_nothing():
    manager = registered(transformers.TrainerCallback(), transformers.TrainerCallback)

    assert not any(manager.has_callbacks(event) for event in manager.events)


def test_both_base_classes_at_once(training, notify):
    class Mine(transformers.TrainerCallback, TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            control.should_log = True

    control = notify(registered(Mine()), "on_train_start").control

    assert [request.author for request in control.requests] == ["Mine"]


def test_early_stopping_stops_when_the_metric_no_longer_improves(training, notify):
    manager = registered(transformers.EarlyStoppingCallback(early_stopping_patience=2))
    notify(manager, "on_train_start")
    stops = []
    for step, loss in enumerate([3.0, 2.0, 2.5, 2.1], start=1):
        training.train_state.step = step
        control = notify(manager, "on_eval_end", metrics={"eval_loss": loss}).control
        stops.append(control.should_training_stop)
        best = training.train_state.best_metric  # as in transformers, the best is noted after callbacks were called
        training.train_state.best_metric = loss if best is None else min(best, loss)

    assert stops == [False, False, False, True]
    assert str(control.requests[0]) == "asked to stop by 'EarlyStoppingCallback' during 'on_evaluate' on rank 0"


def test_early_stopping_keeps_its_own_check_of_the_arguments(training, notify):
    training.args.metric_for_best_model = None

    with pytest.raises(AssertionError, match="metric_for_best_model") as raised:
        notify(registered(transformers.EarlyStoppingCallback()), "on_train_start")

    assert raised.value.__notes__ == ["raised by callback 'EarlyStoppingCallback' during 'on_train_begin'"]


def test_the_default_flow_asks_for_what_is_due(training, notify):
    manager = registered(transformers.trainer_callback.DefaultFlowCallback())
    due = {}
    for step in range(1, 11):
        training.train_state.step = step
        control = notify(manager, "on_step_end").control
        due[step] = "".join(
            letter
            for letter, flag in zip("lest", ("log", "evaluate", "save", "training_stop"), strict=True)
            if getattr(control, f"should_{flag}")
        )

    assert due == {1: "l", 2: "l", 3: "e", 4: "ls", 5: "", 6: "le", 7: "", 8: "ls", 9: "e", 10: "lest"}


def test_the_printer_prints_the_logs(training, notify, capsys):
    notify(registered(transformers.PrinterCallback()), "on_log", logs={"loss": 1.23456, "total_flos": 1e9})

    assert capsys.readouterr().out == "{'loss': '1.235'}\n"


def test_the_progress_bar_runs_from_beginning_to_end(training, notify, capsys):
    bar = transformers.ProgressCallback()
    manager = registered(bar)
    notify(manager, "on_train_start")
    for training.train_state.step in range(1, 11):
        notify(manager, "on_step_end")
    assert (bar.training_bar.n, bar.training_bar.total) == (10, 10)
    notify(manager, "on_log", logs={"loss": 0.5})
    for _ in range(3):
        notify(manager, "on_eval_step_end", hf_objects={"eval_dataloader": [1, 2, 3]})
    assert (bar.prediction_bar.n, bar.prediction_bar.total) == (3, 3)
    notify(manager, "on_eval_end", metrics={})
    assert bar.prediction_bar is None
    notify(manager, "on_test_step_end", hf_objects={"eval_dataloader": [1, 2]})
    assert bar.prediction_bar.total == 2
    notify(manager, "on_test_end", metrics={})
    notify(manager, "on_train_end")

    assert bar.training_bar is bar.prediction_bar is None
    output = capsys.readouterr()
    assert "{'loss': '0.5'}" in output.out
    assert "10/10" in output.err


def test_the_progress_bar_stays_quiet_on_other_ranks(training, notify, capsys):
    training.info.rank = training.info.local_rank = 1
    manager = registered(transformers.ProgressCallback(), transformers.PrinterCallback())

    notify(manager, "on_train_start", rank=1)
    notify(manager, "on_step_end", rank=1)
    notify(manager, "on_log", rank=1, logs={"loss": 0.5})
    notify(manager, "on_train_end", rank=1)

    assert capsys.readouterr() == ("", "")


def test_every_callback_that_transformers_ships_is_accepted():
    from transformers.integrations import integration_utils

    found = [
        cls
        for module in (integration_utils, transformers.trainer_callback)
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, transformers.TrainerCallback) and cls.__module__ == module.__name__
    ]

    for cls in found:  # most constructors want the tracker's own package; only the methods matter here
        manager = CallbackManager()
        manager.add(type(cls.__name__, (cls,), {"__init__": lambda self: None, "__del__": lambda self: None})())
        assert any(manager.has_callbacks(event) for event in manager.events) or cls is transformers.TrainerCallback

    assert len(found) >= 10


def test_the_same_methods_run_under_transformers_own_handler_and_under_ours(training, notify):
    """One callback, called by both in the same way; it cannot tell the difference."""

    def recorder(base):
        class Recorder(base):
            def __init__(self):
                self.story = []

            def on_train_begin(self, args, state, control, **kwargs):
                self.story.append(("begin", args.logging_steps, state.max_steps, kwargs["model"]))

            def on_step_end(self, args, state, control, optimizer=None, **kwargs):
                self.story.append(("step", state.global_step, optimizer))
                control.should_training_stop = state.global_step == 2

            def on_log(self, args, state, control, logs=None, **kwargs):
                self.story.append(("log", logs))

        return Recorder()

    theirs, ours = recorder(transformers.TrainerCallback), recorder(TrainerCallback)
    handler = transformers.trainer_callback.CallbackHandler([theirs], "chunk", None, "optimizer", None)
    control, manager = transformers.TrainerControl(), registered(ours)
    state = transformers.TrainerState(max_steps=10)
    handler.on_train_begin(training.args, state, control)
    notify(manager, "on_train_start", model=["chunk"])
    for step in (1, 2):
        state.global_step = training.train_state.step = step
        handler.on_step_end(training.args, state, control)
        context = notify(manager, "on_step_end", model=["chunk"], optimizer="optimizer")
        handler.on_log(training.args, state, control, {"loss": 1.0})
        notify(manager, "on_log", logs={"loss": 1.0})

    assert ours.story == theirs.story
    assert context.control.should_training_stop is control.should_training_stop is True
