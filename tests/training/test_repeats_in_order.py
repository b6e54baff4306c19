"""What a run was sent before it was interrupted is repeated in the order in which it took effect, each exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from onstep import Callback, CallbackManager, JsonLogger, pretrain
from onstep.config import ConfigContainer
from onstep.events import Request
from tests.support.resuming import Interrupted
from tests.support.whole_runs import left_by
from tests.training.test_steering import Make, decisions, make

__all__ = ["make"]  # the fixture

Plan = dict[int, list[tuple[str, dict[str, Any]]]]


class Sends(Callback):
    """Sends requests from outside after the n-th step of this process; asks itself for a rollback after step `own`."""

    def __init__(self, plan: Plan, own: int | None = None) -> None:
        self.plan, self.own, self.done = plan, own, 0

    def on_step_end(self, context: Any) -> None:
        self.done += 1
        if context.step == self.own:
            self.own = None
            context.control.rollback("again", to_step=4)
        for flag, details in self.plan.get(self.done, []):
            sent = {"command_id": uuid4().hex, **details}
            context.control.add_request(Request(flag, "someone", "", "", 0, sent))


def rate(value: float) -> tuple[str, dict[str, Any]]:
    return "set", {"key": "lr_factor", "value": value}


def back(to_step: int | None = None, lr_factor: float = 1.0) -> tuple[str, dict[str, Any]]:
    return "rollback", {"to_step": to_step, "lr_factor": lr_factor}


SAVE: tuple[str, dict[str, Any]] = ("should_save", {})


def train(config: ConfigContainer, plan: Plan, dies_at: int | None = None, own: int | None = None) -> dict[str, Any]:
    """The values in force at the end, unless the process dies at the n-th step that it begins."""
    manager, steps = CallbackManager(), iter(range(1, 1000))
    manager.add([JsonLogger(), Sends(plan, own)])

    def die(context: Any) -> None:
        if next(steps) == dies_at:
            raise Interrupted

    manager.register("on_step_begin", die)
    if dies_at is None:
        return dict(pretrain(config, callbacks=manager).train_state.overrides)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    return {}


def directory(config: ConfigContainer) -> Path:
    return Path(str(config.run.output_dir)) / str(config.run.name)


def flags(config: ConfigContainer, flag: str) -> list[tuple[int, bool]]:
    found = [one for one in decisions(directory(config)) if one["flag"] == flag]
    return [(one["step"], bool(one["details"].get("repeated"))) for one in found]


@pytest.mark.parametrize(
    ("plan", "own"),
    [
        ({9: [back(4)], 11: [rate(0.1)]}, None),
        ({9: [back(4)], 11: [back(4, 0.5)]}, None),
        ({9: [back(4), rate(0.1)], 10: [rate(0.3)]}, None),
        ({9: [back(4), back(None, 0.1)], 12: [rate(0.1)]}, None),
        ({7: [rate(0.5)], 11: [rate(0.1)]}, 9),
    ],
)
def test_what_followed_a_rollback_is_repeated_after_it(make: Make, plan: Plan, own: int | None) -> None:
    whole, killed = make("whole"), make("killed")
    expected = train(whole, plan, own=own)
    train(killed, plan, 13, own)
    assert train(killed, {}, own=own) == expected
    assert left_by(directory(killed))["weights"] == left_by(directory(whole))["weights"]
    count = sum(flag == "rollback" for one in plan.values() for flag, _ in one)
    assert len(flags(killed, "refused")) == len(flags(whole, "refused")) == (count - 1 if 12 in plan else 0)


def test_what_is_sent_while_a_rollback_is_still_to_be_repeated_comes_before_it(make: Make) -> None:
    whole, killed = make("whole"), make("killed")
    expected = train(whole, {5: [rate(0.5)], 7: [rate(0.1)], 9: [back(4, 0.5)], 11: [rate(2.0)]})
    train(killed, {5: [rate(0.5)], 9: [back(4, 0.5)], 11: [rate(2.0)]}, 13)
    train(killed, {3: [rate(0.1)]}, 4)  # after step 7
    assert train(killed, {}) == expected
    assert left_by(directory(killed))["weights"] == left_by(directory(whole))["weights"]


def test_a_newer_command_holds_against_an_older_one_that_is_repeated_in_its_step(make: Make) -> None:
    config = make("newer")
    train(config, {5: [rate(0.5)]}, 6)
    assert train(config, {1: [rate(0.1)]}) == {"lr_factor": 0.1}
    assert flags(config, "set") == [(5, False), (5, True), (5, False)]


@pytest.mark.parametrize("is_async", [True, False])
def test_what_a_paused_run_is_sent_after_its_state_was_captured_is_repeated(make: Make, is_async: bool) -> None:
    config, manager, asks = make("paused"), CallbackManager(), iter([[SAVE], [rate(0.1)], [("resume", {})]])
    config.checkpoint.async_save = is_async
    manager.add([JsonLogger(), Sends({5: [("pause", {})]})])

    def send(context: Any) -> None:
        for flag, details in next(asks):
            context.control.add_request(Request(flag, "someone", "", "", 0, {"command_id": flag, **details}))

    def die(context: Any) -> None:
        if context.step == 6:
            raise Interrupted

    manager.register("on_paused", send)
    manager.register("on_step_begin", die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    assert train(config, {}) == {"lr_factor": 0.1}


def test_the_commands_of_a_branch_that_was_left_never_come_back(make: Make) -> None:
    config = make("left")
    train(config, {9: [rate(0.1)]}, 14)
    config = make("left")
    config.checkpoint.ckpt_step = 4
    train(config, {1: [rate(0.7)]}, 2)
    config = make("left")
    config.checkpoint.ckpt_step = 4
    assert train(config, {}) == {"lr_factor": 0.7}
    assert flags(config, "set") == [(9, False), (5, False), (5, True)]


def test_a_repeated_rollback_goes_where_it_went(make: Make) -> None:
    config = make("where")
    train(config, {11: [back()]}, 12)
    train(config, {2: [SAVE]})
    assert flags(config, "rolled_back") == [(8, False), (8, True)]


def test_a_repeated_rollback_whose_checkpoint_is_gone_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    config = make("gone")
    train(config, {10: [SAVE], 11: [back()], 13: [back(8)]}, 15)
    train(config, {})
    assert flags(config, "rolled_back") == [(10, False), (8, False), (8, True), (8, True)]
    assert "went to step 10, whose checkpoint is not there any more; it goes to step 8" in caplog.text


def test_a_refused_rollback_is_not_repeated(make: Make) -> None:
    config = make("refused")
    train(config, {3: [back()]}, 4)
    train(config, {2: [SAVE]})
    assert flags(config, "rolled_back") == []
    assert flags(config, "refused") == [(3, False)]
