"""A user's own torch scheduler in the loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from onstep.errors import ConfigError
from onstep.optim import MetricSchedulerAdapter, TorchSchedulerAdapter, TrainingOptimizer


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


def test_its_attributes_are_those_of_the_torch_scheduler_also_of_a_copy() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    adapter = copy.deepcopy(TorchSchedulerAdapter(ExponentialLR(optimizer, gamma=0.5)))
    assert adapter.get_last_lr() == adapter.base_lrs == [1.0]
    assert adapter.last_epoch == 0
    with pytest.raises(AttributeError):
        _ = adapter.nothing_of_the_kind


def test_the_state_of_a_schedule_of_ours_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(ConfigError, match=r"Onstep's own schedule, linear, which cannot continue as .*ExponentialLR"):
        TorchSchedulerAdapter(ExponentialLR(optimizer, gamma=0.5)).load_state_dict({"lr_decay_style": "linear"})


def test_one_that_follows_a_metric_leaves_the_rate_alone_until_it_observes_one() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    adapter = MetricSchedulerAdapter(ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
    for metric in (3.0, 4.0):
        adapter.step(8)
        adapter.observe(metric)
    assert adapter.get_last_lr() == [0.5]
    assert adapter.rates_before_last_step() == [1.0]
    assert adapter.num_steps == 16


def test_a_scheduler_that_waits_for_a_metric_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau requires a metric"):
        TorchSchedulerAdapter(ReduceLROnPlateau(optimizer))
