"""Seconds that counted, and those that a rollback takes back."""

from __future__ import annotations

from onstep.metrics.throughput import CountedSeconds


def test_a_step_whose_update_was_left_out_does_not_count() -> None:
    counted = CountedSeconds(0)
    for is_applied in (True, False, True):
        counted.add_step(2.0, is_applied)
    assert (counted.total, counted.in_interval) == (4.0, 4.0)


def test_waiting_for_the_device_counts_as_far_as_its_steps() -> None:
    counted = CountedSeconds(0)
    for is_applied in (True, False, True, True):
        counted.add_step(1.0, is_applied)
    counted.add_wait(4.0)
    assert counted.total == 6.0


def test_an_interval_without_steps_has_nothing_that_counts() -> None:
    counted = CountedSeconds(0)
    counted.add_wait(4.0)
    assert counted.total == 0.0


def test_a_rollback_undoes_what_came_after_the_checkpoint() -> None:
    counted = CountedSeconds(10)
    counted.add_step(1.0, True)
    counted.mark(11)
    counted.next_interval()
    counted.add_step(2.0, True)
    counted.add_step(4.0, True)
    counted.go_back(11)
    assert (counted.total, counted.in_interval) == (1.0, 0.0)


def test_a_rollback_over_an_interval_leaves_none_of_it_negative() -> None:
    counted = CountedSeconds(10)
    counted.add_step(8.0, True)
    counted.next_interval()
    counted.add_step(1.0, True)
    counted.go_back(10)
    assert (counted.total, counted.in_interval) == (0.0, 0.0)


def test_a_second_rollback_goes_by_what_the_first_left() -> None:
    counted = CountedSeconds(0)
    counted.add_step(1.0, True)
    counted.mark(1)
    counted.add_step(1.0, True)
    counted.mark(2)
    counted.add_step(1.0, True)
    counted.go_back(1)
    counted.add_step(5.0, True)
    counted.go_back(2)
    assert counted.total == 1.0
