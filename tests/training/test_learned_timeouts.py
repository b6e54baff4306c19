"""Sections are timed, and the longest one seen gives the limit."""

from __future__ import annotations

from typing import Any

import pytest

from onstep.distributed import World
from onstep.processes.heartbeat import HEARTBEAT
from onstep.training.fault_tolerance.learned_timeouts import LearnedTimeouts


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def clock_of(time: Time, limits: dict[str, float] | None = None, **options: Any) -> LearnedTimeouts:
    limits = {} if limits is None else limits
    clock = LearnedTimeouts(World(), limits, safety_factor=5.0, shortest_seconds=1.0, clock=time, **options)
    clock.init_workload_monitoring()
    return clock


def pass_section(clock: LearnedTimeouts, time: Time, name: str, seconds: float) -> None:
    clock.start_section(name)
    time.now += seconds
    clock.end_section(name)


def test_a_limit_is_five_times_the_longest_and_never_below_the_shortest() -> None:
    time, limits = Time(), dict[str, float]()
    clock = clock_of(time, limits)
    for seconds in (1.0, 3.0, 2.0):
        pass_section(clock, time, "step", seconds)
    pass_section(clock, time, "checkpointing", 0.1)
    assert clock.calculate_and_set_section_timeouts(["step", "checkpointing"], calc_out_of_section=False)
    assert limits == {"step": 15.0, "checkpointing": 1.0}


def test_only_the_selected_sections_are_learned_and_only_those_seen() -> None:
    time, limits = Time(), dict[str, float]()
    clock = clock_of(time, limits)
    pass_section(clock, time, "step", 2.0)
    pass_section(clock, time, "setup", 9.0)
    clock.calculate_and_set_section_timeouts(["step", "checkpointing"], calc_out_of_section=False)
    assert limits == {"step": 10.0}


def test_the_time_between_sections_has_a_limit_of_its_own() -> None:
    time, limits = Time(), dict[str, float]()
    clock = clock_of(time, limits)
    time.now += 4.0
    pass_section(clock, time, "step", 1.0)
    time.now += 7.0
    clock.calculate_and_set_section_timeouts([], calc_out_of_section=True)
    assert limits == {"out_of_section": 35.0}


def test_what_was_learned_goes_on_in_the_next_start() -> None:
    time, limits = Time(), dict[str, float]()
    clock = clock_of(time, limits)
    pass_section(clock, time, "step", 4.0)
    clock.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
    time, later = Time(), dict[str, float]()
    again = clock_of(time, later)
    again.load_state_dict(clock.state_dict())
    assert later == {"step": 20.0}
    pass_section(again, time, "step", 1.0)
    again.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
    assert later == {"step": 20.0}, "the longest time of any start counts"


def test_no_limit_that_is_read_is_below_the_shortest() -> None:
    limits = dict[str, float]()
    clock = clock_of(Time(), limits)
    clock.load_state_dict({"limits": {"step": 1e-9, "setup": 7.0}, "longest": {"step": 2e-10, "setup": 1.4}})
    assert limits == {"step": 1.0, "setup": 7.0}


def test_the_heartbeat_knows_the_innermost_open_section() -> None:
    clock = clock_of(Time())
    clock.start_section("step")
    clock.start_section("checkpointing")
    assert HEARTBEAT.section == "checkpointing"
    clock.end_section("checkpointing")
    assert HEARTBEAT.section == "step"
    clock.end_section("step")
    clock.end_section("step")
    assert HEARTBEAT.section is None


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"limits": [1], "longest": {}},
        {"limits": {"step": "long"}, "longest": {}},
        {"limits": {"step": -1}},
        {"limits": {"step": 2.0}, "longest": {"setup": 1.0}},
    ],
)
def test_a_state_of_another_form_is_refused(content: dict[str, Any]) -> None:
    limits: dict[str, float] = {}
    with pytest.raises(ValueError, match="expected seconds"):
        clock_of(Time(), limits).load_state_dict(content)
    assert limits == {}
