"""The callbacks of a run that is killed: one shows from outside where the run is, the other has a state to lose.

Brought to `onstep train` by `--import kill_callbacks.py`.
"""

from __future__ import annotations

import os
import random
from typing import Any

import torch

from onstep import TrainerCallback
from tests.support.faults.kill_marks import Marks, Phase


class ShowWhere(TrainerCallback):
    """Marks the phases. A save begins for a callback when its state is asked for, and ends with `on_save`."""

    def __init__(self) -> None:
        self._marks = Marks.of_environment()
        self._rank = int(os.environ.get("RANK", "0"))
        self._phase, self._is_saving, self._step = Phase.START_UP, False, 0
        self._around = Phase.START_UP

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(phase=Phase.STEP, step=state.global_step)

    def on_eval_start(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._around = self._phase
        self._show(phase=Phase.EVALUATION)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(phase=self._around)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(is_saving=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._show(phase=Phase.END, is_saving=False, step=state.global_step)

    def state_dict(self) -> dict[str, Any]:
        if self._phase != Phase.START_UP:  # before the first step the run only looks whether it can be saved
            self._show(is_saving=True)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def _show(self, phase: Phase | None = None, is_saving: bool | None = None, step: int | None = None) -> None:
        self._phase = self._phase if phase is None else phase
        self._is_saving = self._is_saving if is_saving is None else is_saving
        self._step = self._step if step is None else step
        if self._marks is not None:
            self._marks.set(self._rank, self._phase, self._is_saving, self._step)


class Remembers(TrainerCallback):
    """A user's callback: remembers its calls, and draws random numbers of its own."""

    def __init__(self) -> None:
        self.notified: list[str] = []
        self.noise = torch.zeros(3, dtype=torch.float64)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.notified.append(f"step {state.global_step} {random.random()}")
        self.noise += torch.rand(3, dtype=torch.float64)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.notified.append(f"log {state.global_step} {logs.get('loss')}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.notified.append(f"evaluate {state.global_step} {metrics['eval_loss']}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.notified.append(f"epoch end {state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.notified.append(f"train end {state.global_step}")

    def state_dict(self) -> dict[str, Any]:
        return {"told": list(self.notified), "noise": self.noise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.notified, self.noise = list(state_dict["told"]), state_dict["noise"]
