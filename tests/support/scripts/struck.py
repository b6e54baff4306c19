"""A user's callback that sends its own process a signal: what `strike.json` in the working directory says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from onstep import Callback


class Struck(Callback):
    """`{"event": ..., "number": ..., "signal": ...}`; without the file nothing happens.

    In place of a signal, with "straggler" the detection has found what it says, with "late" the time is over.
    """

    def __init__(self) -> None:
        path = Path("strike.json")
        self._strike = json.loads(path.read_text()) if path.exists() else {"event": None}
        self._notified = 0

    def _count(self, context: Any) -> None:
        if context.event == self._strike["event"]:
            self._notified += 1
            if self._notified == self._strike["number"] and "straggler" in self._strike:
                context.state.exits.straggler = self._strike["straggler"]
            elif self._notified == self._strike["number"] and "late" in self._strike:
                context.state.exits.deadline = 0.0
            elif self._notified == self._strike["number"]:
                os.kill(os.getpid(), signal.Signals[self._strike["signal"]])

    on_data_init_start = on_train_start = on_step_begin = on_forward_backward_start = on_step_end = _count
    on_eval_step_end = on_test_step_end = on_log = _count

    def on_train_end(self, context: Any) -> None:
        self._note("on_train_end")

    def on_run_end(self, context: Any) -> None:
        self._note(f"on_run_end {context.reason}")

    def _note(self, text: str) -> None:
        with Path("ends.txt").open("a") as file:
            file.write(text + "\n")


class Heavy(Callback):
    """Makes a small model count as a million times as large, so that its speed has digits in TFLOP/s."""

    def on_train_start(self, context: Any) -> None:
        context.state.flops_per_token *= 1e6
