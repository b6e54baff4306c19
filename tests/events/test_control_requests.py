"""Requests beyond the flags: leave out an update, go back, set a value."""

from __future__ import annotations

import pytest

from onstep.errors import ConfigError
from onstep.events import Control, Request
from onstep.events.control import BEFORE_UPDATE, FLAGS
from onstep.events.settings import SETTABLE


def asked(control: Control) -> list[tuple[str, str]]:
    return [(request.flag, request.reason) for request in control.requests]


@pytest.mark.parametrize("event", BEFORE_UPDATE)
def test_a_skip_is_asked_once_and_handed_over_once_without_the_rest(event: str) -> None:
    control = Control(author="Guard", event=event, rank=2)
    control.save("keep")
    control.skip("bad batch")
    control.skip("again")

    assert control.pop_skips() == [Request("skip", "Guard", event, "bad batch", 2)]
    assert control.pop_skips() == []
    assert asked(control) == [("should_save", "keep")]


@pytest.mark.parametrize("event", ["on_train_step_start", "on_train_step_end", "on_step_end", "on_log"])
def test_a_skip_at_another_event_is_refused_with_the_right_ones(event: str) -> None:
    control = Control(event=event)
    with pytest.raises(ConfigError, match=rf"got a call during '{event}'.*on_pre_optimizer_step"):
        control.skip()
    assert control.requests == []


def test_requests_say_in_words_what_they_ask_for() -> None:
    control = Control(author="Guard", event="on_substep_end")
    control.skip("bad batch")
    control.rollback("diverging")
    control.set("lr_factor", 0.5)
    words = [str(request) for request in control.requests]
    where = "by 'Guard' during 'on_substep_end' on rank 0"
    assert words == [
        f"asked to skip the update {where}: bad batch",
        f"asked to roll back to a checkpoint {where}: diverging",
        f"asked to set lr_factor to 0.5 {where}",
    ]


def test_such_requests_touch_no_flag_but_are_noticed_by_the_other_ranks() -> None:
    control = Control()
    control.rollback()
    control.rollback("twice")
    control.set("log_interval", 5)
    assert not any(getattr(control, flag) for flag in FLAGS)
    assert control.vector()[-1] == 1
    assert [request.flag for request in control.pop_requests()] == ["rollback", "set"]


@pytest.mark.parametrize(
    ("key", "value"), [("lr_factor", 0.0), ("lr_factor", 2), ("log_interval", 0), ("eval_interval", None)]
)
def test_what_can_be_set(key: str, value: float | None) -> None:
    control = Control()
    control.set(key, value, "why")
    assert control.requests[0].details == {"key": key, "value": value}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("log_intervall", 3, "Did you mean 'log_interval'"),
        ("lr", 3e-4, "Keys that can: lr_factor"),
        ("lr_factor", -0.1, r"lr_factor must be a number >= 0.*got -0\.1"),
        ("lr_factor", float("nan"), "must be a number"),
        ("lr_factor", "0.5", "must be a number"),
        ("log_interval", 2.5, "must be an integer"),
        ("log_interval", True, "must be an integer"),
        ("save_interval", -1, ">= 0"),
        ("train_iters", 0, ">= 1"),
        ("train_iters", 10**400, r"at most 2\*\*53"),
        ("lr_factor", float("inf"), "must be a number"),
    ],
)
def test_what_cannot_be_set_is_refused_at_once(key: str, value: float, says: str) -> None:
    control = Control()
    with pytest.raises(ConfigError, match=says):
        control.set(key, value)
    assert control.requests == []


def test_every_settable_key_has_a_smallest_value_that_it_takes() -> None:
    for key, (kind, least, *_) in SETTABLE.items():
        Control().set(key, kind(least))


def test_the_gates_own_decision_is_a_request_in_its_name() -> None:
    control, other_rank = Control(), Control(rank=1)
    control.add_request(Request("should_training_stop", "anomaly gate", "", "NaN"))
    other_rank.set_flag("should_training_stop")
    assert control.should_training_stop is other_rank.should_training_stop is True
    assert [request.author for request in control.requests] == ["anomaly gate"]
    assert other_rank.requests == []


def test_a_decided_rollback_is_forgotten_by_a_new_run() -> None:
    control = Control()
    control.rollback_request = Request("rollback", "Guard", "on_step_end")
    control.clear_stops()
    assert control.rollback_request is None
