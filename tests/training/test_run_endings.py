"""The events of the end of a run are fired exactly once, whatever happened."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.events import CallbackContext, Dispatcher
from onstep.training import evaluate
from onstep.training.lifecycle.endings import run_scope
from tests.support.small_runs import TinyModel, eval_loader, run, small_state, sum_step

ENDINGS = ("on_exception", "on_train_end", "on_run_end")


def endings(config: ConfigContainer, event: str | None, action: Any, error: type[BaseException] | None) -> list[str]:
    """The events of the end when `action` runs at the first call at `event`."""
    manager, notified = CallbackManager(), []

    def note(context: CallbackContext) -> None:
        notified.append(context.event if context.event != "on_run_end" else f"on_run_end {context.reason}")

    for ending in ENDINGS:
        manager.register(ending, note)
    if event is not None:
        manager.register(event, action)
    if error is None:
        pretrain(config, callbacks=manager)
    else:
        with pytest.raises(error) as raised:
            pretrain(config, callbacks=manager)
        if event is not None and error is RuntimeError:
            assert any(event in note for note in raised.value.__notes__)
    return notified


def fail(error: BaseException) -> Any:
    def action(context: CallbackContext) -> None:
        raise error

    return action


def test_a_completed_run(tiny_config: ConfigContainer) -> None:
    assert endings(tiny_config, None, None, None) == ["on_train_end", "on_run_end completed"]


@pytest.mark.parametrize("ask", ["stop", "abort"])
def test_a_stopped_run(tiny_config: ConfigContainer, ask: str) -> None:
    notified = endings(tiny_config, "on_step_end", lambda context: getattr(context.control, ask)("enough"), None)
    assert notified == ["on_train_end", "on_run_end stopped"]


@pytest.mark.parametrize(
    "event",
    ["on_train_start", "on_epoch_start", "on_train_step_start", "on_pre_optimizer_step", "on_log", "on_eval_end"],
)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_run(tiny_config: ConfigContainer, event: str, error: type[BaseException]) -> None:
    notified = endings(tiny_config, event, fail(error("broken")), error)
    assert notified == ["on_exception", "on_train_end", "on_run_end failed"]


def test_a_failed_run_names_the_threads_that_keep_its_process(
    tiny_config: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, name=name, daemon=name == "theirs") for name in ("mine", "theirs")]
    for thread in threads:
        thread.start()
    try:
        endings(tiny_config, "on_epoch_start", fail(RuntimeError("broken")), RuntimeError)
    finally:
        over.set()
    said = [text for text in caplog.messages if "process lives until these threads end" in text]
    assert len(said) == 1
    assert "mine" in said[0]
    assert "theirs" not in said[0]


def test_a_failure_before_training_has_no_train_end(tiny_config: ConfigContainer) -> None:
    notified = endings(tiny_config, "on_data_init_start", fail(RuntimeError("broken")), RuntimeError)
    assert notified == ["on_exception", "on_run_end failed"]


def test_a_failure_in_train_end_itself_is_fired_once(tiny_config: ConfigContainer) -> None:
    notified = endings(tiny_config, "on_train_end", fail(RuntimeError("broken")), RuntimeError)
    assert notified == ["on_train_end", "on_exception", "on_run_end failed"]


def test_a_decided_exit_is_no_exception_and_stops_the_run(tiny_config: ConfigContainer) -> None:
    notified = endings(tiny_config, "on_step_end", fail(SystemExit(0)), SystemExit)
    assert notified == ["on_train_end", "on_run_end stopped"]


def test_a_failure_after_training_is_fired_after_its_end(tiny_config: ConfigContainer) -> None:
    notified = endings(tiny_config, "on_test_end", fail(RuntimeError("broken")), RuntimeError)
    assert notified == ["on_train_end", "on_exception", "on_run_end failed"]


def test_a_failing_forward_step_fails_the_run(tiny_config: ConfigContainer) -> None:
    manager, notified = CallbackManager(), []
    for event in ENDINGS:
        manager.register(event, lambda context: notified.append((context.event, str(context.exception))))

    def broken(data_iterator: Any, model: Any) -> Any:
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer") as raised:
        pretrain(tiny_config, broken, callbacks=manager)
    assert not [note for note in raised.value.__notes__ if "during 'on_" in note]
    assert notified == [("on_exception", "no such layer"), ("on_train_end", "None"), ("on_run_end", "no such layer")]


def small_endings() -> tuple[CallbackManager, list[str]]:
    manager, notified = CallbackManager(), []
    for event in ENDINGS:
        manager.register(event, lambda context: notified.append(f"{context.event} {context.reason or ''}".strip()))
    return manager, notified


@pytest.mark.parametrize("fails", [False, True])
def test_train_alone_tells_the_whole_end(fails: bool) -> None:
    manager, notified = small_endings()
    if fails:
        manager.register("on_step_end", fail(RuntimeError("broken")))
        with pytest.raises(RuntimeError):
            run(small_state(train_iters=2), manager)
        assert notified == ["on_exception", "on_train_end", "on_run_end failed"]
    else:
        run(small_state(train_iters=2), manager)
        assert notified == ["on_train_end", "on_run_end completed"]


def test_every_ending_reaches_every_callback_and_the_first_error_is_raised() -> None:
    manager, notified = CallbackManager(), []
    for number in (1, 2):
        for event in ENDINGS:

            def broken(context: CallbackContext, number: int = number) -> None:
                notified.append(f"{context.event} {number}")
                raise RuntimeError(f"{context.event} {number}")

            manager.register(event, broken)
    manager.register("on_step_end", fail(ValueError("first")))
    with pytest.raises(ValueError, match="first") as raised:
        run(small_state(train_iters=2), manager)
    assert notified == [f"{event} {number}" for event in ENDINGS for number in (1, 2)]
    notes = "\n".join(raised.value.__notes__)
    assert "during 'on_step_end'" in notes
    assert all(f"{event} 1" in notes for event in ENDINGS)


@pytest.mark.parametrize("ends", [None, SystemExit(0)])
def test_an_error_of_the_last_callback_is_not_lost(ends: BaseException | None) -> None:
    manager = CallbackManager()
    manager.register("on_run_end", fail(RuntimeError("disk full")))
    if ends is not None:
        manager.register("on_step_end", fail(ends))
    state = small_state(train_iters=2)
    with pytest.raises(RuntimeError, match="disk full"):
        run(state, manager)
    assert state.ending.ended == "failed"
    assert str(state.ending.error).startswith("RuntimeError: disk full (raised by callback ")


def test_a_handled_error_of_an_evaluation_inside_a_run_ends_nothing() -> None:
    manager, notified = small_endings()
    calls: list[int] = []

    def broken_step(data_iterator: Any, model: torch.nn.Module) -> Any:
        raise RuntimeError("no such layer")

    def evaluate_and_shrug(context: CallbackContext) -> None:
        with (
            pytest.raises(RuntimeError),
            run_scope(context.state, Dispatcher(manager, context.state, context.model).fire),
        ):
            evaluate(context.state, broken_step, eval_loader(), context.model, None, None)
        calls.append(len(notified))

    manager.register("on_step_end", evaluate_and_shrug)
    run(small_state(train_iters=2), manager, model=TinyModel(), step=sum_step)
    assert calls == [0, 0], "no callback is called while training continues"
    assert notified == ["on_train_end", "on_run_end completed"]


def test_each_training_of_a_state_has_an_end_of_its_own() -> None:
    manager, notified = small_endings()
    state = small_state(train_iters=2)
    run(state, manager)
    state.cfg.train.train_iters = 3
    run(state, manager)
    assert notified == ["on_train_end", "on_run_end completed"] * 2


def test_a_stop_of_a_continued_training_does_not_end_the_next_one(tmp_path: Path) -> None:
    state = small_state(train_iters=2)
    state.cfg.checkpoint.save = str(tmp_path)
    run(state)
    again = small_state(train_iters=6)
    again.cfg.checkpoint.save, again.cfg.checkpoint.on_config_change = str(tmp_path), "apply"
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: context.control.stop("enough"))
    run(again, manager)
    assert again.train_state.step == 3
    again.cfg.checkpoint.save = None
    run(again)
    assert again.train_state.step == 6
