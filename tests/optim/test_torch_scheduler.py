"""A user's own torch scheduler in the loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from onstep.errors import ConfigError
from onstep.optim import MetricSchedulerAdapter, TorchSchedulerAdapter, TrainingOptimizer, check_length


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


def one_cycle(optimizer: torch.optim.Optimizer, total_steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=total_steps)


def in_turn(first: int, second: int | None, milestone: int) -> Any:
    def make(optimizer: torch.optim.Optimizer) -> SequentialLR:
        last = StepLR(optimizer, 2) if second is None else one_cycle(optimizer, second)
        return SequentialLR(optimizer, [one_cycle(optimizer, first), last], [milestone])

    return make


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (lambda optimizer: one_cycle(optimizer, 5), 5),
        (lambda optimizer: ChainedScheduler([ExponentialLR(optimizer, 0.9), one_cycle(optimizer, 5)]), 5),
        (in_turn(8, 4, milestone=3), 7),
        (in_turn(4, None, milestone=6), 4),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_refused_where_it_would_fail(make: Any, most: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)
    scheduler = TorchSchedulerAdapter(make(optimizer))
    for step in range(most):
        check_length(scheduler, step, most)
        message = rf"ends after {most} steps .* is at step {step}, but the run is at step {step} of {most + 1}: create"
        with pytest.raises(ConfigError, match=message):
            check_length(scheduler, step, most + 1)
        optimizer.step()
        scheduler.step(1)
    with pytest.raises(ConfigError, match=r"failed at last_epoch \w+ with ValueError: Tried to step"):
        scheduler.step(1)


def test_a_schedule_whose_first_part_is_as_long_as_it_is_used_has_no_end() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0, momentum=0.9)
    scheduler = TorchSchedulerAdapter(in_turn(4, None, milestone=5)(optimizer))
    check_length(scheduler, 0, 1000)
    for _ in range(10):
        optimizer.step()
        scheduler.step(1)


def test_a_schedule_that_gives_no_rate_is_named_with_its_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = TorchSchedulerAdapter(LambdaLR(optimizer, lambda step: 1.0 if step < 2 else None))
    optimizer.step()
    scheduler.step(1)
    with pytest.raises(ConfigError, match=r"LambdaLR.step.. failed at last_epoch 2 with TypeError: .*must give a rate"):
        scheduler.step(1)
