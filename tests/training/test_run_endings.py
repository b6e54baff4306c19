"""The end of a run is told exactly once, whatever happened."""

from __future__ import annotations

from typing import Any

import pytest

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.events import CallbackContext

ENDINGS = ("on_exception", "on_train_end", "on_run_end")


def endings(config: ConfigContainer, event: str | None, action: Any, error: type[BaseException] | None) -> list[str]:
    """What is told at the end when `action` runs at the first telling of `event`."""
    manager, told = CallbackManager(), []

    def note(context: CallbackContext) -> None:
        told.append(context.event if context.event != "on_run_end" else f"on_run_end {context.reason}")

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
    return told


def fail(error: BaseException) -> Any:
    def action(context: CallbackContext) -> None:
        raise error

    return action


def test_a_completed_run(tiny_config: ConfigContainer) -> None:
    assert endings(tiny_config, None, None, None) == ["on_train_end", "on_run_end completed"]


@pytest.mark.parametrize("ask", ["stop", "abort"])
def test_a_stopped_run(tiny_config: ConfigContainer, ask: str) -> None:
    told = endings(tiny_config, "on_step_end", lambda context: getattr(context.control, ask)("enough"), None)
    assert told == ["on_train_end", "on_run_end stopped"]


@pytest.mark.parametrize(
    "event",
    ["on_train_start", "on_epoch_start", "on_train_step_start", "on_pre_optimizer_step", "on_log", "on_eval_end"],
)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_run(tiny_config: ConfigContainer, event: str, error: type[BaseException]) -> None:
    told = endings(tiny_config, event, fail(error("broken")), error)
    assert told == ["on_exception", "on_train_end", "on_run_end failed"]


def test_a_failure_before_training_has_no_train_end(tiny_config: ConfigContainer) -> None:
    told = endings(tiny_config, "on_data_init_start", fail(RuntimeError("broken")), RuntimeError)
    assert told == ["on_exception", "on_run_end failed"]


def test_a_failure_in_train_end_itself_is_told_once(tiny_config: ConfigContainer) -> None:
    told = endings(tiny_config, "on_train_end", fail(RuntimeError("broken")), RuntimeError)
    assert told == ["on_train_end", "on_exception", "on_run_end failed"]


def test_a_decided_exit_is_no_exception(tiny_config: ConfigContainer) -> None:
    told = endings(tiny_config, "on_step_end", fail(SystemExit(0)), SystemExit)
    assert "on_exception" not in told
    assert told.count("on_train_end") == 1
    assert told[-1].startswith("on_run_end")
    assert len([ending for ending in told if ending.startswith("on_run_end")]) == 1
