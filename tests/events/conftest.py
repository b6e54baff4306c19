"""A small run for the event engine: what the loop would hand it, without the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from onstep.events import CallbackContext, RunInfo, RunState
from onstep.train_state import TrainState


@dataclass
class Run:
    """What the engine reads of a `GlobalState`."""

    train_state: TrainState = field(default_factory=TrainState)
    info: RunInfo = field(default_factory=RunInfo)
    args: Any = None

    @property
    def trainer_state(self) -> RunState:
        return RunState(self.train_state, self.info)


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def notify(run):
    """Fires an event with a fresh context, as the loop does; returns the context."""

    def fire(manager, event, **fields):
        context = CallbackContext(run, fields.pop("model", [object()]), manager.user_state, **fields)
        manager.fire(event, context)
        return context

    return fire
