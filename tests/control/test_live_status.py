"""What a job shows of itself while it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onstep.control.inbox import Inbox
from onstep.control.live_status import LiveStatus


@pytest.fixture
def run() -> Any:
    """What is read of a run of 100 steps."""
    return SimpleNamespace(
        train_state=SimpleNamespace(step=0, overrides={}),
        trainer_state=SimpleNamespace(max_steps=100, epoch=0.0),
        control=SimpleNamespace(declared={}),
        cfg=None,
    )


def test_a_pause_slows_nothing_down(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onstep.control.live_status.configured_values", lambda run: {})
    seconds = [0.0]
    live = LiveStatus(run, Inbox(), clock=lambda: seconds[0])
    seconds[0], run.train_state.step = 10.0, 20
    assert (live()["steps_per_second"], live()["eta_seconds"]) == (2.0, 40.0)
    live.pause()
    seconds[0] = 1000.0
    assert (live()["steps_per_second"], live()["eta_seconds"]) == (2.0, 40.0)
    live.resume()
    seconds[0], run.train_state.step = 1010.0, 40
    assert live()["steps_per_second"] == 2.0
