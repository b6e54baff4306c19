"""A stop that a run was sent is repeated after an interruption; who extends the run lifts what had ended it."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from onstep import Callback, CallbackManager, JsonLogger, pretrain
from onstep.config import ConfigContainer
from onstep.events import Request
from onstep.training.bridge.global_state import GlobalState
from tests.support.resuming import Interrupted
from tests.support.whole_runs import left_by
from tests.training.test_repeats_in_order import Plan, Sends, back, directory, flags, rate
from tests.training.test_steering import Make, decisions, make

__all__ = ["make"]  # the fixture

STOP: tuple[str, dict[str, Any]] = ("should_training_stop", {})
SAVE_AND_STOP = [("should_save", {"command_id": "both"}), ("should_training_stop", {"command_id": "both"})]
ABORT = [("should_abort_without_save", {"command_id": "all"}), ("should_training_stop", {"command_id": "all"})]


def length(value: int | None) -> tuple[str, dict[str, Any]]:
    return "set", {"key": "train_iters", "value": value}


class Stops(Callback):
    """Stops the run after a step, by itself."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, context: Any) -> None:
        if context.step == self.step:
            context.control.stop("enough")


def train(config: ConfigContainer, plan: Plan, *more: Callback, dies: str = "", at: int = 0) -> GlobalState | None:
    """Start or continue a run; `dies` is an event, and the process ends when it is fired at step `at`.

    `on_decision` is fired right after the line of a decision is written.
    """
    manager = CallbackManager()
    manager.add([JsonLogger(), Sends(plan), *more])
    if not dies:
        return pretrain(config, callbacks=manager)

    def die(context: Any) -> None:
        if context.step == at and (dies != "on_decision" or context.request.flag == "should_training_stop"):
            raise Interrupted

    manager.register(dies, die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    return None


def end(config: ConfigContainer, plan: Plan, *more: Callback) -> tuple[str | None, int, dict[str, Any]]:
    """How a run ends, at which step, and the values that are in force then."""
    state = train(config, plan, *more)
    assert state is not None
    return state.ending.ended, state.train_state.step, state.train_state.overrides


def longer(config: ConfigContainer, steps: int = 20) -> ConfigContainer:
    config.train.train_iters, config.checkpoint.on_config_change = steps, "apply"
    return config


def saved_steps(config: ConfigContainer) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in (directory(config) / "checkpoints").glob("c*"))


@pytest.mark.parametrize(
    "plan",
    [
        {7: [STOP]},
        {7: SAVE_AND_STOP},
        {6: [rate(0.5)], 7: [STOP]},
        {7: [STOP, back(4, 0.5)]},
        {9: [back(4)], 11: [STOP]},  # after step 6
    ],
)
def test_a_stop_that_was_sent_is_repeated_after_a_kill(make: Make, plan: Plan) -> None:
    whole, killed = make("whole"), make("killed")
    expected = end(whole, plan)
    assert expected[0] == "stopped"
    train(killed, plan, dies="on_final_metrics", at=expected[1])
    assert end(killed, {}) == expected
    assert left_by(directory(killed))["weights"] == left_by(directory(whole))["weights"]
    assert saved_steps(killed) == saved_steps(whole)


@pytest.mark.parametrize("saves_at_end", [True, False])
def test_a_save_that_was_sent_with_a_stop_is_repeated_with_it(make: Make, saves_at_end: bool) -> None:
    config = make("both")
    config.checkpoint.save_at_end = saves_at_end
    train(config, {7: SAVE_AND_STOP}, dies="on_decision", at=7)
    assert saved_steps(config) == [4]
    assert end(config, {}) == ("stopped", 7, {})
    assert saved_steps(config) == [4, 7]


def test_an_abort_that_was_sent_is_repeated_after_a_kill(make: Make) -> None:
    config = make("aborted")
    train(config, {7: ABORT}, dies="on_train_end", at=7)
    assert end(config, {}) == ("stopped", 7, {})
    assert saved_steps(config) == [4]


def test_what_preceded_a_stop_in_its_step_is_repeated_before_it(make: Make) -> None:
    def send(context: Any) -> None:
        for flag, details in next(asks):
            context.control.add_request(Request(flag, "someone", "", "", 0, {"command_id": uuid4().hex, **details}))

    config, asks = make("paused"), iter([[rate(0.5)], [STOP]])
    manager = CallbackManager()
    manager.add(Sends({6: [("pause", {})]}))
    manager.register("on_paused", send)

    def die(context: Any) -> None:
        raise Interrupted

    manager.register("on_final_metrics", die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    assert end(config, {}) == ("stopped", 6, {"lr_factor": 0.5})
    assert flags(config, "refused") == []


def test_a_stop_that_a_callback_requested_is_not_repeated(make: Make) -> None:
    config = make("callback")
    train(config, {}, Stops(7), dies="on_final_metrics", at=7)
    assert end(config, {}) == ("completed", 14, {})


def test_a_run_without_its_stop_continues_where_that_is_asked_for(make: Make) -> None:
    config = make("without")
    train(config, {6: [rate(0.5)], 7: [STOP]}, dies="on_final_metrics", at=7)
    config.run.without_commands_from = 7
    assert end(config, {}) == ("completed", 14, {"lr_factor": 0.5})


def test_a_stopped_run_is_extended(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    def made(name: str) -> ConfigContainer:
        config = make(name)
        config.scheduler.lr_decay_iters = 20
        return config

    whole = longer(made("whole"))
    train(whole, {})
    stops: dict[str, tuple[int, Plan]] = {
        "stop": (7, {7: [STOP]}),
        "save and stop": (7, {7: SAVE_AND_STOP}),
        "abort": (7, {7: ABORT}),
        "abort before the first checkpoint": (3, {3: ABORT}),
        "callback": (7, {}),
    }
    for how, (steps, plan) in stops.items():
        config = made(how)
        capsys.readouterr()
        assert end(config, plan, *[Stops(7)] * (how == "callback")) == ("stopped", steps, {}), how
        pretrain(config)
        assert f"was stopped: {steps} steps, nothing left to do" in (shown := capsys.readouterr().out)
        assert (f"because after step {steps} it was asked to " in shown) is (how != "callback")
        assert end(longer(made(how)), {}) == ("completed", 20, {}), how
        assert left_by(directory(config))["weights"] == left_by(directory(whole))["weights"], how


@pytest.mark.parametrize("plan", [{7: [STOP]}, {7: ABORT}])
def test_an_extended_run_that_is_killed_continues_and_obeys_what_it_is_sent_since(make: Make, plan: Plan) -> None:
    config = make("extended")
    train(config, plan)
    train(longer(make("extended")), {}, dies="on_init_end", at=4 if plan[7] is ABORT else 7)
    train(longer(make("extended")), {}, dies="on_step_begin", at=7)
    assert end(longer(make("extended")), {}) == ("completed", 20, {})

    config = make("again")
    train(config, plan)
    steps = 4 if plan[7] is ABORT else 1  # after step 8, of which there is no checkpoint yet
    train(longer(make("again")), {steps: [STOP]}, dies="on_decision", at=8)
    assert end(longer(make("again")), {}) == ("stopped", 8, {})


def test_a_stop_that_is_still_to_be_repeated_is_lifted_by_an_extension(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    config = make("extended")
    train(config, {7: SAVE_AND_STOP}, dies="on_final_metrics", at=7)
    assert end(longer(make("extended")), {}) == ("completed", 20, {})
    assert "was 14 and is 20); no longer in force: after step 7: asked to stop by 'someone'" in caplog.text
    config = make("repeated")
    train(config, {7: [STOP]}, dies="on_final_metrics", at=7)
    assert end(longer(make("repeated")), {}) == ("completed", 20, {})


@pytest.mark.parametrize("is_killed", [True, False])
def test_an_extension_replaces_a_number_of_steps_that_was_set(
    make: Make, is_killed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make("set")
    if is_killed:
        train(config, {7: [length(10), rate(0.5)]}, dies="on_step_begin", at=8)
    else:
        assert end(config, {7: [length(10), rate(0.5)]}) == ("completed", 10, {"lr_factor": 0.5, "train_iters": 10})
        pretrain(config)
        assert "because after step 7 it was asked to set train_iters to 10 by 'someone'" in capsys.readouterr().out
    train(longer(make("set")), {}, dies="on_step_begin", at=11)
    assert end(longer(make("set")), {1: [length(18)]}) == ("completed", 18, {"lr_factor": 0.5, "train_iters": 18})
    changed = [one for one in decisions(directory(config)) if one["flag"] == "changed"]
    assert len(changed) == 1
    assert changed[0]["reason"].startswith("train.train_iters was 14 and is 20")
    assert len(changed[0]["details"]["command_ids"]) == 1


def test_more_epochs_replace_a_number_of_steps_that_was_set(make: Make) -> None:
    def epochs(number: int) -> ConfigContainer:
        config = make("epochs")
        config.train.train_iters, config.train.num_epochs = None, number
        config.checkpoint.on_config_change = "apply"
        return config

    assert end(epochs(1), {7: [length(10)]})[:2] == ("completed", 10)
    assert end(epochs(2), {}) == ("completed", 50, {})


def test_another_setting_lifts_a_stop_and_no_number_of_steps(make: Make) -> None:
    def faster(name: str) -> ConfigContainer:
        config = make(name)
        config.optimizer.lr, config.checkpoint.on_config_change = 0.01, "apply"
        return config

    train(make("stopped"), {7: [STOP]})
    assert end(faster("stopped"), {}) == ("completed", 14, {})
    train(make("shortened"), {7: [length(10)], 8: [STOP]})
    assert end(faster("shortened"), {}) == ("completed", 10, {"train_iters": 10})


def test_the_same_command_continues_to_its_stop_with_apply_too(make: Make) -> None:
    config = make("same")
    config.checkpoint.on_config_change = "apply"
    train(config, {7: [STOP]}, dies="on_final_metrics", at=7)
    assert end(config, {}) == ("stopped", 7, {})
    content = json.loads((directory(config) / "run.json").read_text())
    assert (content["status"], content["step"]) == ("stopped", 7)
    assert [one for one in decisions(directory(config)) if one["flag"] == "changed"] == []
