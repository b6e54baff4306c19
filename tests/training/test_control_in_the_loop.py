"""Callbacks ask, the loop decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, TrainerCallback
from onstep.errors import forget_warnings
from onstep.training import GlobalState
from onstep.training.runs.run_dir import RunDir
from tests.support.small_runs import eval_loader, loader, run, small_state


def trace(manager: CallbackManager, *events: str) -> list[tuple[str, int]]:
    """The calls at these events, with the step."""
    calls: list[tuple[str, int]] = []
    for event in events:
        manager.register(event, lambda context: calls.append((context.event, context.state.train_state.step)))
    return calls


def at_step(step: int, ask: str, *words: str) -> Any:
    def action(context: Any) -> None:
        if context.state.train_state.step == step:
            getattr(context.control, ask)(*words)

    return action


class Vetoes(TrainerCallback):
    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        setattr(control, self.flag, False)
        return control


@pytest.mark.parametrize(("flag", "event"), [("should_log", "on_log_step"), ("should_evaluate", "on_eval_start")])
def test_what_is_due_can_be_vetoed_at_the_end_of_the_step(flag: str, event: str) -> None:
    def calls(*vetoes: Any) -> list[tuple[str, int]]:
        manager, state = CallbackManager(), small_state(train_iters=4)
        state.cfg.logger.log_interval = state.cfg.validation.eval_interval = 2
        seen = trace(manager, event)
        manager.add(list(vetoes))
        run(state, manager, valid=eval_loader())
        return seen

    assert calls() == [(event, 2), (event, 4)]
    assert calls(Vetoes(flag)) == []


def test_a_request_is_honoured_at_the_same_step_wherever_it_is_made() -> None:
    manager, state = CallbackManager(), small_state(train_iters=6)
    calls = trace(manager, "on_log_step", "on_log", "on_eval_end", "on_train_end")
    manager.register("on_forward_backward_end", at_step(1, "log"))  # in the second step
    manager.register("on_log", at_step(2, "evaluate"))
    manager.register("on_eval_end", at_step(2, "stop"))
    run(state, manager, valid=eval_loader())
    assert calls == [("on_log_step", 2), ("on_log", 2), ("on_eval_end", 2), ("on_log", 2), ("on_train_end", 2)]


@pytest.mark.parametrize("event", ["on_train_start", "on_epoch_start"])
def test_a_stop_asked_before_the_first_step_runs_none(event: str) -> None:
    manager, state = CallbackManager(), small_state(train_iters=6)
    manager.register(event, lambda context: context.control.stop("too late already"))
    run(state, manager)
    assert (state.train_state.step, state.ending.was_stopped) == (0, True)
    assert state.ending.stopped_by is not None
    assert state.ending.stopped_by.event == event


def test_an_abort_does_nothing_more_with_the_step() -> None:
    manager, state = CallbackManager(), small_state(train_iters=6)
    state.cfg.logger.log_interval = state.cfg.validation.eval_interval = 2
    calls = trace(manager, "on_log", "on_eval_start", "on_train_end")
    manager.register("on_step_end", at_step(2, "abort", "diverged"))
    run(state, manager, valid=eval_loader())
    assert calls == [("on_train_end", 2)]
    assert state.ending.was_stopped


def test_an_abort_at_the_end_of_an_epoch_does_not_evaluate_it() -> None:
    manager, state = CallbackManager(), small_state(train_iters=6)
    state.cfg.validation.eval_each_epoch = True
    calls = trace(manager, "on_eval_start", "on_train_end")
    manager.register("on_epoch_end", lambda context: context.control.abort())
    run(state, manager, valid=eval_loader())
    assert calls == [("on_train_end", 3)]


def test_the_end_of_an_epoch_can_be_asked_for_and_the_next_one_starts_with_its_own_samples() -> None:
    manager, state, ids = CallbackManager(), small_state(train_iters=5), []
    calls = trace(manager, "on_epoch_start", "on_epoch_end")
    manager.register("on_train_step_start", lambda context: ids.append(context.sample_ids))
    manager.register("on_step_end", at_step(2, "end_epoch"))
    run(state, manager)
    assert calls == [("on_epoch_start", 0), ("on_epoch_end", 2), ("on_epoch_start", 2), ("on_epoch_end", 5)]
    second = loader(epoch=1)
    assert ids[2:] == [second.read(2).sample_ids for _ in range(3)]
    assert (state.train_state.epoch, state.train_state.steps_in_epoch) == (2, 0)


def test_ending_an_epoch_before_its_first_step_is_not_the_end_of_the_data() -> None:
    manager, state, asked = CallbackManager(), small_state(train_iters=2), []

    def end_first(context: Any) -> None:
        if not asked:
            asked.append(1)
            context.control.end_epoch()

    manager.register("on_epoch_start", end_first)
    run(state, manager)
    assert (state.train_state.step, state.train_state.epoch) == (2, 1)


def test_stop_flags_are_cleared_when_training_starts_again() -> None:
    manager, state = CallbackManager(), small_state(train_iters=6)
    manager.register("on_step_end", at_step(2, "stop"))
    data = loader()
    run(state, manager, data=data)
    assert (state.train_state.step, state.ending.was_stopped) == (2, True)
    run(state, data=data)
    assert (state.train_state.step, state.ending.was_stopped, state.ending.stopped_by) == (6, False, None)


def test_the_second_training_counts_its_own_mean_loss() -> None:
    state, data = small_state(train_iters=2), loader()
    model = run(state, data=data)
    first = state.mean_loss()
    state.cfg.train.train_iters = 4
    run(state, data=data, model=model)
    assert state.train_state.step == 4
    assert state.losses.num_steps == 2
    assert state.mean_loss() != first


def withdrawn_later(state: GlobalState) -> CallbackManager:
    """A stop that is agreed on at the end of step 2 and taken back in `on_log` of that step."""
    manager = CallbackManager()
    state.cfg.logger.log_interval = 2

    def take_back(context: Any) -> None:
        context.control.should_training_stop = False

    manager.register("on_step_end", at_step(2, "stop", "hasty"))
    manager.register("on_log", take_back)
    return manager


def test_a_stop_that_is_withdrawn_after_all_leaves_no_trace() -> None:
    state = small_state(train_iters=5)
    run(state, withdrawn_later(state))
    assert (state.train_state.step, state.ending.was_stopped, state.ending.stopped_by) == (5, False, None)


def test_a_later_stop_is_not_blamed_on_who_withdrew() -> None:
    state = small_state(train_iters=6)
    manager = withdrawn_later(state)
    manager.register("on_step_end", at_step(3, "stop", "for good"))
    run(state, manager)
    assert state.train_state.step == 3
    assert state.ending.stopped_by is not None
    assert state.ending.stopped_by.reason == "for good"


def test_a_stop_at_the_last_step_is_a_completed_run() -> None:
    manager, state = CallbackManager(), small_state(train_iters=3)
    manager.register("on_step_end", at_step(3, "stop"))
    reasons: list[str | None] = []
    manager.register("on_run_end", lambda context: reasons.append(context.reason))
    run(state, manager)
    assert (state.ending.was_stopped, state.ending.stopped_by, reasons) == (False, None, ["completed"])


def test_what_was_asked_and_by_whom_is_written_to_the_decisions(tmp_path: Path) -> None:
    class Careful(TrainerCallback):
        name = "careful"

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log = state.global_step == 1

    manager, state = CallbackManager(), small_state(train_iters=6)
    state.run_dir = RunDir(tmp_path)
    manager.add(Careful())
    manager.register("on_step_end", at_step(2, "stop", "good enough"))
    run(state, manager)
    rows = [json.loads(line) for line in state.run_dir.decisions.read_text().splitlines()]
    kept = [{key: row[key] for key in ("step", "flag", "author", "event", "reason", "rank")} for row in rows]
    assert kept[0] == {
        "step": 1,
        "flag": "should_log",
        "author": "careful",
        "event": "on_step_end",
        "reason": "",
        "rank": 0,
    }
    assert [(row["step"], row["flag"], row["reason"]) for row in kept[1:]] == [
        (2, "should_training_stop", "good enough")
    ]
    assert all(row["timestamp"] > 1e9 for row in rows)


def test_a_save_that_has_no_directory_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    forget_warnings()  # of tests before
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: context.control.save())
    run(small_state(train_iters=3), manager)
    assert sum("has no directory to save in" in message for message in caplog.messages) == 1
