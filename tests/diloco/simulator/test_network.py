"""The virtual clock and the lines, against times that can be computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from onstep.diloco.simulator.environment.clock import Clock
from onstep.diloco.simulator.environment.network import Line, Path, packet_loss_limit


class Arrivals:
    """Notes when which message arrived."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.times: dict[Any, float] = {}

    def note(self, name: Any) -> None:
        self.times[name] = self.clock.now


def test_events_of_the_same_time_happen_in_the_order_they_were_added_and_never_in_the_past() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, seen.append, "b")
    clock.at(2.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    clock.at(2.0, seen.append, "c")
    clock.after(1.0, seen.append, "a")
    clock.run()
    assert seen == ["a", "b", "c", 2.0]


def test_a_run_ends_at_its_time_with_what_is_due_later_untouched() -> None:
    clock, seen = Clock(), []
    clock.at(5.0, seen.append, "late")
    clock.run(3.0)
    assert (clock.now, seen) == (3.0, [])
    clock.run(9.0)
    assert seen == ["late"]


def test_a_lone_message_passes_at_the_rate_of_the_line() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    line = Line(clock, 100.0)
    clock.at(7.0, line.carry, 250, arrivals.note, "a")
    clock.run()
    assert arrivals.times == {"a": 9.5}


def test_messages_share_a_line_equally_while_they_pass_together() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    line = Line(clock, 100.0)
    clock.at(0.0, line.carry, 400, arrivals.note, "long")
    clock.at(1.0, line.carry, 100, arrivals.note, "short")  # both at 50 from here: short passes at 3
    clock.run()
    assert arrivals.times == pytest.approx({"short": 3.0, "long": 5.0})


def test_a_thousand_equal_messages_pass_together_after_a_thousand_times_the_time() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    line = Line(clock, 1e6)
    for name in range(1000):
        line.carry(2_000_000, arrivals.note, name)
    clock.run()
    assert arrivals.times == pytest.approx(dict.fromkeys(range(1000), 2000.0))
    assert clock.events < 20  # not one for each message


def test_a_busy_line_carries_no_byte_twice_and_none_for_nothing() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    line = Line(clock, 10.0)
    for name in range(50):
        clock.at(name * 0.37, line.carry, 7 + name, arrivals.note, name)
    clock.run()
    assert max(arrivals.times.values()) == pytest.approx(sum(7 + name for name in range(50)) / 10.0)


def test_a_line_still_carries_after_a_year_when_the_clock_has_become_coarse() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    line, year = Line(clock, 1e9), 3.2e7 + 1 / 3
    for name in range(99):
        clock.at(year + name / 7, line.carry, 100_000_001 / 3, arrivals.note, name)
    clock.at(year + 100.0, clock.stop)
    clock.run()
    assert len(arrivals.times) == 99


def test_a_path_is_as_slow_as_its_slowest_line_and_adds_the_latency_once() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    path = Path(clock, [Line(clock, 100.0), Line(clock, 50.0)], latency=0.25, most_bytes_per_second=math.inf)
    path.send(100, arrivals.note, "body")
    path.send(0, arrivals.note, "no body")
    clock.run()
    assert arrivals.times == pytest.approx({"body": 2.25, "no body": 0.25})


def test_a_connection_with_packet_loss_does_not_fill_its_line() -> None:
    clock = Clock()
    arrivals = Arrivals(clock)
    limit = packet_loss_limit(0.01, 0.1, "reno")
    assert limit == pytest.approx(1460 / 0.1 * math.sqrt(150.0))
    path = Path(clock, [Line(clock, 1e9)], latency=0.05, most_bytes_per_second=limit)
    path.send(1_000_000, arrivals.note, "body")
    clock.run()
    assert arrivals.times["body"] == pytest.approx(1_000_000 / limit + 0.05)
    assert packet_loss_limit(0.0, 0.1) == math.inf


def test_the_limit_of_packet_loss_is_that_of_the_congestion_control() -> None:
    near, far = (0.01, 0.1), (1e-6, 0.2)
    assert packet_loss_limit(*near) == packet_loss_limit(*near, "reno") == pytest.approx(1460 / 0.1 * 150**0.5)
    window = (0.4 * 3.7 / 1.2) ** 0.25 * (0.2 / 1e-6) ** 0.75  # RFC 9438, equation 5, with C = 0.4 and beta = 0.7
    assert packet_loss_limit(*far) == pytest.approx(1460 / 0.2 * window, rel=1e-3)
    assert packet_loss_limit(*far) > 5 * packet_loss_limit(*far, "reno")
    assert packet_loss_limit(*near, "bbr") == math.inf
