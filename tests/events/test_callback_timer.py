"""How long callbacks take, on a clock that only they move."""

from __future__ import annotations

from typing import Any

import pytest

from onstep.events import Callback, CallbackContext, CallbackManager


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def taking(clock: Clock, seconds: int) -> Any:
    def work(context: CallbackContext) -> None:
        clock.now += seconds

    work.__qualname__ = f"work_{seconds}"
    return work


def test_each_callback_has_its_seconds(notify: Any, clock: Clock) -> None:
    manager = CallbackManager()
    manager.register("on_log", taking(clock, 2))
    manager.register("on_log", taking(clock, 5))
    manager.register("on_step_end", taking(clock, 5))
    manager.callback_timer.start(clock)
    for event in ("on_log", "on_log", "on_step_end"):
        notify(manager, event)
        clock.now += 100
    assert manager.callback_timer.seconds == {"work_2": 4, "work_5": 15}
    assert manager.callback_timer.reading() == (clock.now, 19)


def test_nothing_is_measured_before_the_start_and_after_the_stop(notify: Any, clock: Clock) -> None:
    manager = CallbackManager()
    manager.register("on_log", taking(clock, 2))
    notify(manager, "on_log")
    assert manager.callback_timer.seconds == {}
    manager.callback_timer.start(clock)
    notify(manager, "on_log")
    manager.callback_timer.stop()
    notify(manager, "on_log")
    assert manager.callback_timer.seconds == {"work_2": 2}
    assert not manager.callback_timer.is_running


def test_a_callback_that_makes_others_be_called_has_only_its_own_time(notify: Any, clock: Clock) -> None:
    manager = CallbackManager()

    class Outer(Callback):
        def on_log(self, context: CallbackContext) -> None:
            clock.now += 1
            notify(manager, "on_eval_end")
            clock.now += 10

    manager.add(Outer())
    manager.register("on_eval_end", taking(clock, 100))
    manager.callback_timer.start(clock)
    notify(manager, "on_log")
    assert manager.callback_timer.seconds == {"Outer": 11, "work_100": 100}


def test_a_callback_can_start_and_stop_it_while_it_is_called(notify: Any, clock: Clock) -> None:
    class Starter(Callback):
        def on_train_start(self, context: CallbackContext) -> None:
            context.callback_timer.start(clock)
            clock.now += 1

        def on_log(self, context: CallbackContext) -> None:
            clock.now += 3
            assert context.callback_timer.reading() == (clock.now, 5)

        def on_train_end(self, context: CallbackContext) -> None:
            context.callback_timer.stop()
            clock.now += 7

    manager = CallbackManager()
    manager.register("on_log", taking(clock, 2))
    manager.add(Starter())
    for event in ("on_train_start", "on_log", "on_train_end"):
        notify(manager, event)
    assert manager.callback_timer.seconds == {"work_2": 2, "Starter": 3}


def test_the_time_of_a_callback_that_raises_counts(notify: Any, clock: Clock) -> None:
    def fail(context: CallbackContext) -> None:
        clock.now += 4
        raise KeyError

    manager = CallbackManager()
    manager.register("on_log", fail)
    manager.register("on_eval_end", taking(clock, 1))
    manager.callback_timer.start(clock)
    with pytest.raises(KeyError):
        notify(manager, "on_log")
    clock.now += 50
    notify(manager, "on_eval_end")
    assert sorted(manager.callback_timer.seconds.values()) == [1, 4]


def test_it_runs_until_everybody_who_started_it_has_stopped_it(notify: Any, clock: Clock) -> None:
    manager = CallbackManager()
    manager.register("on_log", taking(clock, 2))
    manager.callback_timer.start(clock)
    manager.callback_timer.start()
    notify(manager, "on_log")
    manager.callback_timer.stop()
    notify(manager, "on_log")
    manager.callback_timer.stop()
    manager.callback_timer.stop()
    notify(manager, "on_log")
    assert manager.callback_timer.seconds == {"work_2": 4}
    manager.callback_timer.start(clock)
    assert manager.callback_timer.seconds == {}
