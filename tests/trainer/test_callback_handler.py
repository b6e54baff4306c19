"""`trainer.callback_handler`, and the state and control of a Trainer, as Hugging Face's scripts use them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import trainer_callback as theirs

from onstep import (
    Callback,
    CallbackHandler,
    DefaultFlowCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from onstep.errors import ConfigError
from tests.support.small_models import Regression, arguments, quiet, regression_rows


class Noted(TrainerCallback):
    """Keeps the keywords of the events that are fired by hand."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_my_event(self, args: Any, state: Any, control: Any, extra: int = 0, **kwargs: Any) -> None:
        self.seen.append((args, state, control, extra, kwargs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.seen.append(metrics)


def trainer_with(tmp_path: Path, *callbacks: Any, **options: Any) -> Trainer:
    return quiet(Regression(), arguments(tmp_path, **options), regression_rows(), callbacks=list(callbacks))


def test_events_of_ones_own_reach_every_callback_that_has_the_method(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Context(Callback):
        def on_my_event(self, context: Any) -> None:
            seen.append((context.event, context.extra, context.trainer_state))

    class Plain(transformers.TrainerCallback):
        def on_my_event(self, args: Any, state: Any, control: Any, model: Any) -> Any:
            seen.append(model)
            control.should_foo = True
            return control

    noted = Noted()
    trainer = trainer_with(tmp_path, noted, Context(), Plain(), TrainerCallback())
    control = trainer.callback_handler.call_event("on_my_event", trainer.args, trainer.state, trainer.control, extra=1)

    ((args, state, got, extra, keywords),) = noted.seen
    assert (args, state, got, extra) == (trainer.args, trainer.state, trainer.control, 1)
    assert keywords["model"] is trainer.model
    assert seen == [("on_my_event", 1, trainer.state), trainer.model]
    assert control is trainer.control
    assert control.should_foo


def test_an_evaluation_that_fires_its_event_itself_reaches_the_callbacks(tmp_path: Path) -> None:
    """As transformers' question-answering Trainer does."""
    noted = Noted()
    trainer = trainer_with(tmp_path, noted)

    trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {"f1": 1.0})

    assert noted.seen == [{"f1": 1.0}]


def test_a_request_made_in_an_event_fired_by_hand_is_a_request_to_the_loop(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_my_event(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    class Fires(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, trainer: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.callback_handler.call_event("on_my_event", args, state, control)

    trainer = trainer_with(tmp_path, Stops(), Fires())

    assert trainer.train().global_step == 2
    assert trainer.global_state is not None
    assert str(trainer.global_state.ending.stopped_by) == "asked to stop by 'Stops' during 'on_my_event' on rank 0"


def test_the_callbacks_are_a_live_list(tmp_path: Path) -> None:
    first, second, third = Noted(), Noted(), Noted()
    trainer = trainer_with(tmp_path, first)
    callbacks = trainer.callback_handler.callbacks

    callbacks.append(third)
    callbacks.insert(1, second)
    assert callbacks == [first, second, third]
    assert trainer.callback_manager.callbacks == [first, second, third]
    callbacks.remove(second)
    del callbacks[0]
    callbacks[0] = first
    assert (len(callbacks), first in callbacks, [*callbacks], callbacks.__add__([third])) == (
        1,
        True,
        [first],
        [first, third],
    )
    trainer.callback_handler.callbacks = [third, Noted]
    assert trainer.callback_handler.callback_list == "Noted\nNoted"
    trainer.add_callback(second)
    assert callbacks[-1] is second


def test_what_a_subclass_sets_on_the_handler_is_passed_on(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Loaders(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(kwargs["eval_dataloader"])

    class Evaluates(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, trainer: Any = None, **kwargs: Any) -> None:
            handler = trainer.callback_handler
            handler.eval_dataloader = "loader"
            handler.on_evaluate(args, state, control, {})
            seen.append(handler.model[0] is trainer.model and handler.optimizer is kwargs["optimizer"])

    trainer_with(tmp_path, Loaders(), Evaluates()).train()

    assert seen == ["loader", True]


def test_a_handler_by_hand_does_what_that_of_transformers_does() -> None:
    def story(base: type, handler_class: Any, control: Any, state: Any) -> list[Any]:
        told: list[Any] = []

        class Tells(base):  # type: ignore[misc, valid-type]
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                told.append((args, state.global_step, logs, sorted(kwargs.keys() - {"trainer", "tokenizer"})))
                control.should_save = True

            def on_mine(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
                told.append(kwargs["extra"])

        class Other(Tells):
            on_log = None

        control.should_log = True
        handler = handler_class([Tells(), theirs.DefaultFlowCallback()], "model", "processor", None, None)
        returned = handler.on_log("args", state, control, {"loss": 1.0})
        handler.pop_callback(theirs.DefaultFlowCallback)
        handler.call_event("on_mine", "args", state, control, extra=3)
        told.append((returned is control, dataclasses.asdict(control)["should_save"], control.should_log))
        told.append((handler.callback_list, handler.pop_callback(int), handler.pop_callback(base) is not None))
        return [*told, len(handler.callbacks)]

    ours = story(TrainerCallback, CallbackHandler, TrainerControl(), TrainerState(global_step=2))
    reference = story(
        theirs.TrainerCallback, theirs.CallbackHandler, theirs.TrainerControl(), theirs.TrainerState(global_step=2)
    )

    assert ours == reference


@pytest.mark.parametrize("strategy", ["steps", "epoch", "no"])
def test_the_default_flow_in_a_handler_by_hand_sets_the_flags_of_that_of_transformers(
    tmp_path: Path, strategy: str
) -> None:
    names = ("logging_strategy", "eval_strategy", "save_strategy")
    args = arguments(tmp_path, **dict.fromkeys(names, strategy))

    def flags(handler_class: Any, flow: Any, state_class: Any, control_class: Any) -> list[Any]:
        seen = []
        for step in range(1, 5):
            handler = handler_class([flow], Regression(), None, None, None)
            state = state_class(max_steps=4, global_step=step, epoch=step, logging_steps=2, save_steps=3, eval_steps=4)
            for event in (handler.on_step_end, handler.on_epoch_end):
                control = event(args, state, control_class())
                seen.append({name: getattr(control, name) for name in dataclasses.asdict(theirs.TrainerControl())})
        return seen

    ours = flags(CallbackHandler, DefaultFlowCallback(), TrainerState, TrainerControl)
    assert ours == flags(
        theirs.CallbackHandler, theirs.DefaultFlowCallback(), theirs.TrainerState, theirs.TrainerControl
    )
    assert any(any(one.values()) for one in ours)


def test_the_default_flow_is_skipped_in_a_run(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, DefaultFlowCallback)
    added = next(one for one in trainer.callback_handler.callbacks if isinstance(one, DefaultFlowCallback))
    assert added.on_step_end not in trainer.callback_manager.list_callbacks("on_step_end")


def test_a_callback_that_is_not_there_cannot_be_removed_by_instance(tmp_path: Path) -> None:
    handler = trainer_with(tmp_path, Noted()).callback_handler

    handler.remove_callback(int)
    with pytest.raises(ValueError, match="is not among the callbacks: Noted"):
        handler.remove_callback(Noted())


def test_state_and_control_are_there_before_training(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, transformers.EarlyStoppingCallback(2))
    reference = transformers.Trainer(
        Regression(),
        transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True),
        callbacks=[transformers.EarlyStoppingCallback(2)],
    )

    assert dataclasses.asdict(trainer.state) == dataclasses.asdict(reference.state)
    assert trainer.control.state() == reference.control.state()
    trainer.state.mine = 3
    assert trainer.state.mine == 3


def test_a_state_that_is_assigned_counts_until_the_next_run(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path)
    trainer.state = TrainerState(global_step=7)
    assert trainer.state.global_step == 7

    trainer.train()

    assert trainer.state.global_step == 3
    assert trainer.state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"] is False


def test_an_evaluation_goes_on_from_the_state_that_is_assigned(tmp_path: Path) -> None:
    saved = TrainerState(global_step=15, epoch=1.5, max_steps=20, num_train_epochs=2, best_metric=0.5)
    saved.log_history.append({"loss": 1.0, "step": 15})
    saved.save_to_json(str(tmp_path / "trainer_state.json"))

    def evaluated(trainer: Any, state_class: Any) -> Any:
        trainer.state = state_class.load_from_json(str(tmp_path / "trainer_state.json"))
        trainer.state.mine = 3
        metrics = trainer.evaluate(regression_rows(6))
        state = trainer.state
        first = state.log_history[0]
        return metrics["epoch"], state.global_step, state.epoch, state.best_metric, state.max_steps, state.mine, first

    args = transformers.TrainingArguments(str(tmp_path / "theirs"), use_cpu=True, report_to="none")
    reference = evaluated(transformers.Trainer(Regression(), args), theirs.TrainerState)

    assert evaluated(quiet(Regression(), arguments(tmp_path)), TrainerState) == reference


def test_the_defaults_of_hugging_face_stand_for_those_in_their_place(tmp_path: Path) -> None:
    def kinds(removed: Any, **options: Any) -> list[str]:
        trainer = Trainer(Regression(), arguments(tmp_path, **options))
        trainer.remove_callback(removed)
        return [type(one).__name__ for one in trainer.callback_handler.callbacks]

    rest = ["DefaultMetrics", "InfoCallback"]
    assert kinds(transformers.PrinterCallback, disable_tqdm=True) == rest
    assert kinds(PrinterCallback, disable_tqdm=True) == rest
    assert kinds(transformers.ProgressCallback, disable_tqdm=False) == rest
    assert len(kinds(PrinterCallback, disable_tqdm=False)) == 3
    assert len(kinds(transformers.ProgressCallback, disable_tqdm=True)) == 3


@pytest.mark.parametrize("default", [theirs.DefaultFlowCallback, DefaultFlowCallback])
def test_the_default_flow_changes_nothing_and_cannot_be_removed(tmp_path: Path, default: Any) -> None:
    def trace(*callbacks: Any) -> tuple[list[Any], Any]:
        trainer = trainer_with(tmp_path / str(len(callbacks)), *callbacks, logging_steps=2, save_strategy="steps")
        trainer.train()
        assert trainer.global_state is not None
        history = [[*sorted(record), record["step"]] for record in trainer.state.log_history]
        return history, trainer.global_state.ending.stopped_by

    class Mine(default):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            return super().on_step_end(args, state, control, **kwargs)

    assert trace(default)[0] == trace()[0] == trace(Mine(), TrainerCallback())[0]
    trainer = trainer_with(tmp_path)
    with pytest.raises(ConfigError, match="DefaultFlowCallback cannot be removed: the loop itself decides what is due"):
        trainer.remove_callback(default)
    trainer.add_callback(default)
    assert isinstance(trainer.pop_callback(default), default)
