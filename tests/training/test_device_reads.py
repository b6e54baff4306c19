"""No read of the device in a step that is not logged, evaluated or the last."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import Callback, CallbackManager, DefaultMetrics, InfoCallback, JsonLogger, ProgressCallback, pretrain
from onstep.config import ConfigContainer
from onstep.optim import TrainingOptimizer
from onstep.optim.finite_gate import DeviceFiniteGate
from tests.support.read_counter import ReadCounter, StepMarker
from tests.support.small_runs import TinyModel, run, small_state


class Reader(Callback):
    """What must not be done: reads the loss at every step."""

    def on_train_step_end(self, context: Any) -> None:
        context.loss_dict["lm loss"].item()


def reads_of(config: ConfigContainer, directory: Path, extra: list[Any]) -> dict[int, int]:
    config.train.micro_batch_size, config.train.train_iters = 2, 10
    config.logger.log_interval, config.validation.eval_interval = 5, None
    config.run.name, config.run.output_dir = "run", str(directory)
    stream = io.StringIO()
    progress = ProgressCallback(use_tqdm=False, output_stream=stream)
    with ReadCounter() as counter:
        pretrain(
            config,
            callbacks=[StepMarker(counter), DefaultMetrics(), progress, InfoCallback(), JsonLogger(), *extra],
        )
    assert counter.num_operators > 1000
    assert "Training complete" in stream.getvalue()
    return counter.by_step()


def test_only_logged_steps_read_the_device(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    reads = reads_of(tiny_config, tmp_path, [])
    assert {step for step, count in reads.items() if count} <= {5, 10}
    assert set(reads) == set(range(1, 11))


def test_the_count_is_red_for_a_callback_that_reads(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    reads = reads_of(tiny_config, tmp_path, [Reader()])
    assert all(reads[step] == 1 for step in range(1, 11) if step not in (5, 10))


@pytest.mark.parametrize("name", ["on_train_metrics", "on_forward_backward_end", "on_pre_optimizer_step"])
def test_listening_to_device_tensors_does_not_read_them(name: str) -> None:
    manager, seen = CallbackManager(), []
    manager.register(name, lambda context: seen.append(context.loss if context.loss is not None else context.grad_norm))
    state = small_state(train_iters=4)
    with ReadCounter() as counter:
        manager.add(StepMarker(counter))
        run(state, manager)
    assert all(isinstance(value, torch.Tensor) for value in seen)
    assert sum(counter.by_step().values()) == 0


def test_a_long_interval_is_folded_without_reading() -> None:
    state, manager = small_state(train_iters=130), CallbackManager()
    state.cfg.logger.log_interval = 1000
    with ReadCounter() as counter:
        manager.add(StepMarker(counter))
        run(state, manager)
    assert sum(counter.by_step().values()) == 0
    assert state.losses.num_steps == 130


def test_the_gate_of_an_accelerator_is_not_read_either() -> None:
    model, state, manager = TinyModel(), small_state(train_iters=12), CallbackManager()
    gate = DeviceFiniteGate(torch.device("cpu"))
    optimizer = TrainingOptimizer(torch.optim.AdamW(model.parameters(), fused=True), gate=gate)
    with ReadCounter() as counter:
        manager.add(StepMarker(counter))
        run(state, manager, model=model, optimizer=optimizer)
    assert sum(counter.by_step().values()) == 0
