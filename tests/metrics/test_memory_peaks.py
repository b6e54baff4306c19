"""Peaks of GPU memory: of a logging interval and of the run, both right however often the run logs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onstep.events import CallbackContext, CallbackManager
from onstep.metrics import report_memory
from onstep.metrics.memory_peaks import MemoryPeaks
from onstep.optim import TrainingOptimizer
from onstep.training import train
from tests.support.emulated_cuda_memory import EmulatedCudaMemory
from tests.support.recording_loggers import record_all
from tests.support.small_models import Regression, arguments, quiet, regression_rows
from tests.support.small_runs import TinyModel, loader, small_state, sum_step

SPIKES = {1: 100, 2: 7000, 3: 200, 4: 300}
"""Bytes that a step allocates and frees again."""


class Spikes:
    """A callback whose steps allocate and free memory."""

    def __init__(self, memory: EmulatedCudaMemory) -> None:
        self._memory = memory

    def on_train_step_start(self, context: CallbackContext) -> None:
        self._memory.spike(SPIKES[context.trainer_state.global_step + 1])


def test_the_peak_of_an_interval_and_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, peaks, device = EmulatedCudaMemory(monkeypatch), MemoryPeaks(), torch.device("cuda", 0)
    memory.spike(500)
    assert peaks.end_interval(device) == 1500
    memory.allocate(100)
    assert peaks.end_interval(device) == 1100
    now = report_memory(peaks=peaks)
    assert (now["mem-max-allocated-gigabytes"], now["mem-allocated-gigabytes"]) == (1.5e-6, 1.1e-6)
    assert now["mem-alloc-retires"] == 2
    assert report_memory()["mem-max-allocated-gigabytes"] == 1.1e-6


def test_a_device_without_counters_has_no_peak() -> None:
    assert MemoryPeaks().end_interval(torch.device("cpu")) is None


@pytest.mark.parametrize("logging_steps", [1, 100])
def test_the_peak_of_a_training_does_not_depend_on_how_often_it_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging_steps: int
) -> None:
    memory = EmulatedCudaMemory(monkeypatch)
    args = arguments(tmp_path, skip_memory_metrics=False, logging_steps=logging_steps, max_steps=4)
    trainer = quiet(Regression(), args, regression_rows(16), callbacks=[Spikes(memory)])
    tracker = trainer.memory._tracker
    tracker.torch, tracker.gpu = memory.module(), {"init": dict.fromkeys(("begin", "end", "alloc", "peaked"), 0)}
    monkeypatch.setattr("transformers.trainer_utils.torch", memory.module())
    metrics = trainer.train().metrics
    assert metrics["train_mem_gpu_peaked_delta"] == 7000
    logged = [line["peak_mem_allocated"] for line in trainer.state.log_history if "peak_mem_allocated" in line]
    assert logged == ([[1100], [8000], [1200], [1300]] if logging_steps == 1 else [])


@pytest.mark.parametrize("log_interval", [1, 4])
def test_bridges_peak_is_of_the_run(monkeypatch: pytest.MonkeyPatch, log_interval: int) -> None:
    memory, state, model = EmulatedCudaMemory(monkeypatch), small_state(train_iters=4), TinyModel()
    options = state.cfg.logger
    options.log_interval, options.tensorboard_log_interval, options.log_memory_to_tensorboard = log_interval, 1, True
    loggers, optimizer = record_all(state), TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    manager = CallbackManager()
    manager.add(Spikes(memory))
    train(sum_step, [model], optimizer, None, loader(), None, state, callback_manager=manager)
    assert loggers["tensorboard"].curve("memory/mem-max-allocated-gigabytes")[4] == 8e-6
