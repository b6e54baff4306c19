"""What an editor and mypy know of a context."""

from __future__ import annotations

from typing import get_type_hints

from torch import Tensor, nn

from onstep.events import Callback, CallbackContext, OptimizerView, RunState, RunView, SchedulerView
from onstep.training import GlobalState


def test_the_fields_of_a_context_have_types_that_an_editor_completes():
    hints = get_type_hints(CallbackContext, localns={"Tensor": Tensor, "nn": nn})

    assert hints["state"] is RunView
    assert hints["model"] == list[nn.Module]
    assert hints["optimizer"] == OptimizerView | None
    assert hints["scheduler"] == SchedulerView | None
    assert get_type_hints(CallbackContext.step.fget)["return"] is int
    assert get_type_hints(CallbackContext.epoch.fget)["return"] is float
    assert get_type_hints(CallbackContext.trainer_state.fget)["return"] is RunState
    assert get_type_hints(Callback.on_step_end)["context"] is CallbackContext


def test_the_loops_state_has_everything_that_a_view_promises():
    names = [name for name in (*vars(RunView), *RunView.__annotations__) if not name.startswith("_")]
    state = GlobalState.__dataclass_fields__.keys() | set(dir(GlobalState))

    assert {"cfg", "train_state", "world"} <= set(names) <= state
