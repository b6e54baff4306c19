"""What a run was sent before it was interrupted is repeated in the order in which it took effect, each exactly once."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
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
        for flag, details in self.plan.get(self.done, []):
            sent = {"command_id": uuid4().hex, **details}
            context.control.add_request(Request(flag, "someone", "", "", 0, sent))
        if context.step == self.own:
            self.own = None
            context.control.rollback("again", to_step=4)


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


@pytest.mark.parametrize("with_it", [[], [back(4, 0.5)]])
def test_each_start_waits_once_for_the_rollback_that_a_callback_requests_again(make: Make, with_it: Any) -> None:
    whole, killed = make("whole"), make("killed")
    expected = train(whole, {9: with_it, 10: [rate(0.5)], 12: [rate(0.1)]}, own=9)
    train(killed, {9: with_it, 10: [rate(0.5)]}, 11, own=9)
    train(killed, {8: [rate(0.1)]}, 9, own=9)  # after the steps 5 to 9 and 5 to 7
    assert train(killed, {}, own=9) == expected
    assert left_by(directory(killed))["weights"] == left_by(directory(whole))["weights"]
    assert flags(killed, "refused") == [(9, False)] * len(with_it) * 2  # the callback's


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
    shutil.rmtree(directory(config) / "checkpoints" / "aside")
    train(config, {})
    assert flags(config, "rolled_back") == [(10, False), (8, False), (8, True), (8, True)]
    assert (
        "went to step 10, whose checkpoint is not there any more; it goes to step 8, so the run differs from"
        in caplog.text
    )


@pytest.mark.parametrize(("deaths", "is_async"), [([2], True), ([], False)])
def test_the_checkpoint_that_a_repeated_rollback_goes_to_is_kept(make: Make, deaths: list[int], is_async: bool) -> None:
    def limited(name: str, most_recent_k: int = 2) -> ConfigContainer:
        config = make(name)
        config.checkpoint.most_recent_k, config.checkpoint.async_save = most_recent_k, is_async
        return config

    plan: Plan = {9: [back(4, 0.5)]}
    train(limited("whole"), plan)
    train(limited("killed"), plan, 10)
    train(limited("killed"), {2: [SAVE]}, 5)  # after the steps 6 and 8
    for death in deaths:
        train(limited("killed", 1), {}, death)
    train(limited("killed", 1), {})
    found = limited("killed")
    assert flags(found, "rolled_back") == [(4, False)] + [(4, True)] * (1 + len(deaths))
    assert left_by(directory(found))["weights"] == left_by(directory(make("whole")))["weights"]
    assert sorted(path.name for path in (directory(found) / "checkpoints").glob("checkpoint-*")) == ["checkpoint-14"]


def test_a_repeated_rollback_that_cannot_be_done_any_more_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    config = make("lost")
    train(config, {9: [back(4, 0.5)]}, 10)
    train(config, {}, 5)
    shutil.rmtree(directory(config) / "checkpoints" / "checkpoint-4")
    train(config, {})
    assert flags(config, "rolled_back") == [(4, False)]
    assert (
        "the rollback after step 9, which is repeated, went to step 4; it is not done, because no verified checkpoint "
        "of step 4 or earlier exists, so the run differs from" in caplog.text
    )


def test_a_refused_rollback_is_not_repeated(make: Make) -> None:
    config = make("refused")
    train(config, {3: [back()]}, 4)
    train(config, {2: [SAVE]})
    assert flags(config, "rolled_back") == []
    assert flags(config, "refused") == [(3, False)]


@pytest.mark.parametrize("ends", [("command", {"command": "boom", "data": {}}), ("should_abort_without_save", {})])
def test_a_rollback_that_the_end_of_the_run_prevents_is_refused_and_not_repeated(make: Make, ends: Any) -> None:
    def raises(context: Any) -> None:
        raise RuntimeError("mine")

    config, manager = make("ended"), CallbackManager()
    manager.add([JsonLogger(), Sends({9: [back(4, 0.5), ends]})])
    manager.register("on_command", raises)
    with pytest.raises(RuntimeError, match="mine") if ends[0] == "command" else nullcontext():
        pretrain(config, callbacks=manager)
    refused = [one["details"] for one in decisions(directory(config)) if one["flag"] == "refused"]
    assert [one["why"] for one in refused if one["refused"] == "command"] == ["RuntimeError: mine"] * len(refused[1:])
    assert refused[-1]["why"] == "training ended before this was done; send it again"
    config = make("ended")
    config.train.train_iters, config.checkpoint.on_config_change = 17, "apply"
    assert train(config, {}) == {}
    assert flags(config, "rolled_back") == []


def test_a_length_that_was_set_can_be_unset_after_a_kill_where_epochs_are_configured(make: Make) -> None:
    config = make("epochs")
    config.train.train_iters, config.train.num_epochs = None, 1
    train(config, {5: [("set", {"key": "train_iters", "value": 10})]}, 10)
    assert train(config, {1: [("set", {"key": "train_iters", "value": None})]}) == {}
    assert (directory(config) / "checkpoints" / "latest").read_text() == "checkpoint-25\n"


def test_a_repeated_rollback_goes_to_a_checkpoint_that_was_set_aside_since(make: Make) -> None:
    plan: Plan = {10: [SAVE], 11: [back()], 13: [back(8)]}
    whole, killed = make("whole"), make("killed")
    train(whole, plan)
    train(killed, plan, 15)
    train(killed, {})
    assert flags(killed, "rolled_back") == [(10, False), (8, False), (10, True), (8, True)]
    assert left_by(directory(killed))["weights"] == left_by(directory(whole))["weights"]


def test_a_save_that_a_kill_kept_from_being_recorded_contains_what_came_before_it(make: Make) -> None:
    """The process dies between the rename that commits the checkpoint and the line in `decisions.jsonl`."""
    plan: Plan = {5: [rate(0.5)], 9: [back(4)], 11: [rate(0.1)], 13: [SAVE]}
    config = make("torn")
    train(config, plan, 14)
    path = directory(config) / "decisions.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["flag"] == "saved"
    path.write_text("".join(lines[:-1]))
    train(config, {})
    assert [one for one in flags(config, "rollback") if one[1]] == []
    assert [one for one in flags(config, "set") if one[1]] == []


@pytest.mark.parametrize("after", [[rate(0.3)], [back(5, 0.5)], []])
@pytest.mark.slow
def test_a_rollback_of_a_paused_run_to_the_step_where_it_waits_is_repeated_there(make: Make, after: Any) -> None:
    def steered(name: str, dies_at: int | None) -> tuple[dict[int, float], list[tuple[int, str]]]:
        config, manager, rates, seen = make(name), CallbackManager(), {}, []
        asks = iter([[SAVE], [back(5, 0.5)], after, [("resume", {})]])

        def send(context: Any) -> None:
            for flag, details in next(asks):
                context.control.add_request(Request(flag, "someone", "", "", 0, {"command_id": uuid4().hex, **details}))

        def begin(context: Any) -> None:
            seen.append(context.step)
            if context.step == dies_at:
                raise Interrupted
            rates[context.step] = context.scheduler.lr_factor

        if dies_at is not None or name == "whole":
            manager.add(Sends({5: [("pause", {})]}))
            manager.register("on_paused", send)
        manager.add(JsonLogger())
        manager.register("on_step_begin", begin)
        if dies_at is None:
            pretrain(config, callbacks=manager)
        else:
            with pytest.raises(Interrupted):
                pretrain(config, callbacks=manager)
        done = [(one["step"], one["flag"]) for one in decisions(directory(config)) if one["flag"] == "rolled_back"]
        refused = [one for one in decisions(directory(config)) if one["flag"] == "refused"]
        assert not refused
        return rates, done

    expected, _ = steered("whole", None)
    steered("killed", 7)
    rates, done = steered("killed", None)
    assert rates == {step: rate for step, rate in expected.items() if step >= 5}
    assert {step for step, _ in done} == {5}
    assert left_by(directory(make("killed")))["weights"] == left_by(directory(make("whole")))["weights"]
