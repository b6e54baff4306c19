"""The quietest step, with nothing asked for but training: the Python calls that it makes into the package."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import onstep
from onstep.data import TrainLoader
from tests.support.small_runs import RaggedRows, TinyModel, run, small_state, stack

LIMIT = 70
"""Calls a step."""
WARMUP, STEPS = 5, 20
OFF = (
    "callbacks",
    "optim/loss_scaler.py",
    "trackers",
    "training/anomalies/spikes.py",
    "training/bridge",
    "training/checkpointing",
    "training/experts",
    "training/fault_tolerance",
    "training/interval_log",
    "training/lifecycle",
    "training/model_parallel",
    "training/profiling",
    "training/reporting/bridge_tags.py",
    "training/reporting/bridge_trackers.py",
    "training/reporting/gpu_telemetry.py",
    "training/reporting/timers.py",
    "training/rerun",
    "training/runs/signals.py",
    "training/stragglers",
    "training/verification",
    "training/watchdog",
)
"""Rooms and modules of features that are off in the quietest step."""
PACKAGE = str(Path(onstep.__file__).parent) + "/"


class CountedForward:
    """A forward step that counts the package's calls over `STEPS` whole steps, from its own call to its own call."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.calls: Counter[tuple[str, str]] = Counter()
        """By file and function."""

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        if self.num_calls == WARMUP:
            sys.setprofile(self._profile)
        elif self.num_calls == WARMUP + STEPS:
            sys.setprofile(None)
        self.num_calls += 1
        return model(**next(data_iterator), reduction="mean"), as_mean

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.calls[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name] += 1


def as_mean(loss: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return loss, {}


def rows_for_ever() -> Any:
    rows = RaggedRows(2)
    return repeat(stack([rows[0], rows[1]]))


def rows_of_a_loader() -> TrainLoader:
    return TrainLoader(RaggedRows(2 * (WARMUP + STEPS + 1)), micro_batch_size=2, global_batch_size=2)


def calls_of_quiet_steps(data: Any) -> Counter[tuple[str, str]]:
    state, forward, model = small_state(batch=2, train_iters=WARMUP + STEPS + 1), CountedForward(), TinyModel()
    state.cfg.ft.watchdog_seconds, state.cfg.train.exit_signal_handler = None, False
    state.cfg.optimizer.clip_grad = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = sys.getprofile()
    gc.collect()  # what earlier tests have left is not closed meanwhile
    gc.disable()
    try:
        run(state, step=forward, data=data, model=model, optimizer=optimizer)
    finally:
        sys.setprofile(before)
        gc.enable()
    assert forward.num_calls == WARMUP + STEPS + 1
    return forward.calls


def listing(calls: Counter[tuple[str, str]]) -> str:
    lines = [f"{count / STEPS:8.2f}  {file} {function}" for (file, function), count in calls.most_common()]
    return "\n".join(lines)


@pytest.mark.parametrize("make_data", [rows_for_ever, rows_of_a_loader])
def test_the_quietest_step_makes_few_calls(make_data: Any) -> None:
    calls = calls_of_quiet_steps(make_data())
    a_step = sum(calls.values()) / STEPS
    assert a_step <= LIMIT, f"{a_step:.2f} calls a step, at most {LIMIT}:\n{listing(calls)}"


@pytest.mark.parametrize("make_data", [rows_for_ever, rows_of_a_loader])
def test_the_quietest_step_calls_nothing_that_is_off(make_data: Any) -> None:
    calls = calls_of_quiet_steps(make_data())
    assert calls
    called = {file for file, _ in calls if any(Path(file).is_relative_to(off) for off in OFF)}
    assert not called, listing(calls)


@pytest.mark.parametrize("off", OFF)
def test_what_is_off_is_named_as_it_is_in_the_package(off: str) -> None:
    assert Path(PACKAGE, off).exists()
