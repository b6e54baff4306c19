"""A run of 20 steps whose every number can be worked out by hand, against files written from the tag matrix.

One weight of 20 is multiplied with ones, so its gradient is 1 at each step and SGD with a rate of 0.5 takes 0.5 off it:
the loss of step k is 20 - (k - 1) / 2. The clock ticks 2 seconds a step.
"""

from __future__ import annotations

import pytest
import torch

from onstep import CallbackManager
from onstep.data import TrainLoader
from onstep.optim import TrainingOptimizer
from onstep.training import Clock, GlobalState, train
from tests.support.golden_runs import SECONDS_A_STEP, START, OneWeight, Rows, forward_step, golden_lines
from tests.support.recording_loggers import record_all
from tests.support.small_runs import LENGTH, small_state


def golden_state() -> GlobalState:
    state = small_state(train_iters=20)
    options = state.cfg.logger
    options.log_interval, options.tensorboard_log_interval, options.throughput_window_size = 10, 5, 5
    options.log_throughput = options.log_throughput_to_tensorboard = options.log_params_norm = True
    options.log_runtime_to_tensorboard = options.log_world_size_to_tensorboard = True
    options.log_timers_to_tensorboard = options.log_l2_norm_grad_to_tensorboard = True
    options.log_memory_to_tensorboard, options.runtime_time_unit = True, "seconds"
    state.cfg.dataset.seq_length, state.cfg.model.vocab_size = LENGTH, 128
    state.cfg.logger.console = "bridge"
    state.clock = Clock(
        wall=lambda: START + SECONDS_A_STEP * state.train_state.step,
        elapsed=lambda: SECONDS_A_STEP * state.train_state.step,
    )
    return state


def run_golden(state: GlobalState, callbacks: CallbackManager | None = None) -> None:
    model = OneWeight()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), clip_grad=None)
    data = TrainLoader(Rows(), micro_batch_size=2, global_batch_size=4)
    train(forward_step, [model], optimizer, None, data, None, state, callback_manager=callbacks)


@pytest.mark.usefixtures("utc")
def test_console_lines_are_the_golden_ones(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", dict)
    run_golden(golden_state())
    assert capsys.readouterr().out.splitlines() == golden_lines("training_log_of_20_steps.txt")


def test_tags_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {"allocated_bytes.all.peak": 3_000_000_000, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: statistics)
    state = golden_state()
    loggers = record_all(state)
    run_golden(state)
    found = [
        f"{name} | {tag} | " + " ".join(f"{x}:{value:g}" for x, value in logger.curve(tag).items())
        for name, logger in loggers.items()
        for tag in logger.tags
    ]
    assert sorted(found) == sorted(golden_lines("training_tags_of_20_steps.txt"))


@pytest.mark.usefixtures("utc")
def test_callbacks_do_not_change_lines_and_may_ask_for_more_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: context.control.__setattr__("should_log", True))
    run_golden(golden_state(), manager)
    lines = [line for line in capsys.readouterr().out.splitlines() if " iteration " in line]
    assert len(lines) == 20
    assert all(" elapsed time per iteration (ms): 2000.0 |" in line for line in lines)
    assert " lm loss: 2.000000E+01 |" in lines[0]
