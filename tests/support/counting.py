"""A callback whose state shows whether it was called as in a run that nobody interrupted."""

from __future__ import annotations

from typing import Any

from onstep import TrainerCallback


class Counting(TrainerCallback):
    """A callback with a state that depends on every call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(f"step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.calls.append(f"log {state.global_step} {logs.get('loss')}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.calls.append(f"evaluate {state.global_step} {metrics['eval_loss']}")

    def state_dict(self) -> dict[str, Any]:
        return {"told": list(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = list(state_dict["told"])
