"""How many points a kill might take: those not taken yet, and those taken a moment ago."""

from __future__ import annotations

from onstep.trackers.delivery import Deliveries


def test_what_was_taken_settles_after_two_seconds() -> None:
    now = [100.0]
    deliveries = Deliveries(clock=lambda: now[0])
    assert deliveries.num_unsettled == 0
    numbers = [deliveries.give() for _ in range(5)]
    assert deliveries.num_unsettled == 5
    deliveries.take(numbers[2])
    assert deliveries.num_unsettled == 5
    now[0] = 102.1
    assert deliveries.num_unsettled == 2
    deliveries.take(numbers[4])
    assert deliveries.num_unsettled == 2
    now[0] = 104.2
    assert deliveries.num_unsettled == 0


def test_a_stream_of_points_settles_while_it_goes_on_and_costs_no_memory() -> None:
    now = [100.0]
    deliveries = Deliveries(clock=lambda: now[0])
    for _ in range(10_000):
        now[0] += 0.01
        deliveries.take(deliveries.give())
        assert deliveries.num_unsettled <= 2.3 / 0.01
    assert deliveries.num_unsettled >= 2.0 / 0.01 - 1
    assert len(deliveries._marks) <= 12
