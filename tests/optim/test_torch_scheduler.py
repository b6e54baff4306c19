"""A user's own torch scheduler in the loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from onstep.errors import ConfigError
from onstep.optim import TorchSchedulerAdapter, TrainingOptimizer


def test_it_steps_once_a_step_whatever_the_number_of_samples() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    training_optimizer = TrainingOptimizer(optimizer)
    scheduler = TorchSchedulerAdapter(ExponentialLR(optimizer, gamma=0.5))
    for _ in range(2):
        training_optimizer.step()
        scheduler.step(64)
    assert scheduler.get_lr(optimizer.param_groups[0]) == 0.25
    assert scheduler.num_steps == 128


def test_its_state_passes_through() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    inner = ExponentialLR(optimizer, gamma=0.5)
    adapter = TorchSchedulerAdapter(inner)
    state = adapter.state_dict()
    assert state == inner.state_dict()
    adapter.load_state_dict(state | {"last_epoch": 5})
    assert inner.last_epoch == 5


def test_a_scheduler_that_waits_for_a_metric_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau requires a metric"):
        TorchSchedulerAdapter(ReduceLROnPlateau(optimizer))
