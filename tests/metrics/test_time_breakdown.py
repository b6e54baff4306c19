"""Accounts that sum to the wall time, whatever is entered when."""

from __future__ import annotations

import random

from onstep.metrics.throughput import TimeBreakdown


class Clock:
    """Whole seconds, so that sums are exact."""

    def __init__(self) -> None:
        self.now = self.in_callbacks = 0

    def __call__(self) -> tuple[float, float]:
        return self.now, self.in_callbacks


def test_time_goes_to_the_open_account() -> None:
    clock = Clock()
    ledger = TimeBreakdown(("other", "data", "step"), clock)
    clock.now = 3
    ledger.enter("data")
    clock.now = 8
    ledger.enter("step")
    clock.now = 10
    ledger.enter()
    clock.now = 11
    assert ledger.balance() == {"other": 4, "data": 5, "step": 2, "callbacks": 0}


def test_time_in_callbacks_is_no_time_of_the_open_account() -> None:
    clock = Clock()
    ledger = TimeBreakdown(("other", "data"), clock)
    ledger.enter("data")
    clock.now, clock.in_callbacks = 10, 4
    assert ledger.balance() == {"other": 0, "data": 6, "callbacks": 4}


def test_what_time_was_can_be_said_afterwards() -> None:
    clock = Clock()
    ledger = TimeBreakdown(("other", "step", "wait"), clock)
    ledger.enter("step")
    clock.now = 5
    ledger.recharge("wait")
    clock.now = 6
    assert ledger.balance() == {"other": 0, "step": 0, "wait": 6, "callbacks": 0}
    assert ledger.of("wait", "step") == 6


def test_the_accounts_sum_to_the_wall_time() -> None:
    clock, draw = Clock(), random.Random(0)
    ledger = TimeBreakdown(("a", "b", "c"), clock)
    for _ in range(500):
        passed = draw.randrange(10)
        clock.now += passed
        clock.in_callbacks += draw.randint(0, passed)
        draw.choice([ledger.enter, ledger.recharge])(draw.choice("abc"))
    assert sum(ledger.balance().values()) == clock.now
