"""A run's arguments and state, as callbacks see them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onstep.events import RunInfo, RunState
from onstep.train_state import TrainState

MakeState = Callable[..., RunState]


@pytest.fixture
def make_state() -> MakeState:
    """Builds the real state view from progress and facts, whichever a keyword belongs to."""

    def make(**values: Any) -> RunState:
        progress = {name: value for name, value in values.items() if name in TrainState.__dataclass_fields__}
        info = {name: value for name, value in values.items() if name not in progress and name != "log_history"}
        state = RunState(TrainState(**progress), RunInfo(**{"max_steps": 100, **info}))
        state.log_history[:] = values.get("log_history", [])
        return state

    return make


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(
        output_dir=str(tmp_path),
        logging_dir=str(tmp_path / "logs"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
