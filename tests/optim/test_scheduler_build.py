"""From the configuration to the scheduler: units, defaults and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onstep.config import OptimizerConfig, SchedulerConfig
from onstep.errors import ConfigError
from onstep.optim import OptimizerParamScheduler, build_scheduler


def build(
    optimizer: torch.optim.Optimizer | None = None, lr: float | None = 1.0, **fields: Any
) -> OptimizerParamScheduler:
    """A scheduler for 100 steps of 4 samples."""
    return build_scheduler(
        optimizer or torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5),
        SchedulerConfig(**fields),
        OptimizerConfig(lr=lr, weight_decay=0.1),
        train_iters=100,
        global_batch_size=4,
    )


def test_the_schedule_is_as_long_as_the_run_by_default() -> None:
    scheduler = build()
    assert scheduler.lr_schedule.lr_decay_steps == 400
    assert scheduler.wd_schedule.wd_incr_steps == 400
    assert (scheduler.lr_schedule.min_lr, scheduler.wd_schedule.end_wd) == (0.0, 0.1)


def test_iterations_become_samples() -> None:
    scheduler = build(lr_decay_style="WSD", lr_decay_iters=50, lr_warmup_iters=5, lr_wsd_decay_iters=10)
    shape = scheduler.lr_schedule
    assert (shape.lr_decay_steps, shape.lr_warmup_steps, shape.wsd_decay_steps) == (200, 20, 40)
    assert scheduler.wd_schedule.wd_incr_steps == 400


def test_sample_fields_are_taken_as_they_are() -> None:
    shape = build(lr_decay_style="WSD", lr_decay_samples=50, lr_warmup_samples=5, lr_wsd_decay_samples=10).lr_schedule
    assert (shape.lr_decay_steps, shape.lr_warmup_steps, shape.wsd_decay_steps) == (50, 5, 10)
    assert build(lr_warmup_samples=5).lr_schedule.lr_decay_steps == 400


def test_mixing_units_is_refused() -> None:
    with pytest.raises(ConfigError, match="got lr_warmup_iters, lr_decay_samples"):
        build(lr_warmup_iters=5, lr_decay_samples=50)


def test_warm_up_fraction_is_a_share_of_the_decay() -> None:
    assert build(lr_warmup_fraction=0.1, lr_decay_iters=50).lr_schedule.lr_warmup_steps == pytest.approx(20)


@pytest.mark.parametrize("fields", [{"lr_warmup_iters": 5}, {"lr_warmup_samples": 5}])
def test_two_lengths_of_warm_up_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a warm-up must have one length"):
        build(lr_warmup_fraction=0.1, **fields)


def test_a_fraction_beyond_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr_warmup_fraction must be between 0 and 1, got 10"):
        build(lr_warmup_fraction=10)


@pytest.mark.parametrize("fields", [{"lr_warmup_iters": 100}, {"lr_warmup_iters": 150}, {"lr_warmup_fraction": 1.0}])
def test_a_warm_up_as_long_as_the_decay_is_capped_with_a_warning(fields: dict[str, float]) -> None:
    with pytest.warns(UserWarning, match="capped to 399") as warned:
        scheduler = build(**fields)
    assert scheduler.lr_schedule.lr_warmup_steps == 399
    assert warned[0].filename == __file__


def test_nothing_to_decay_over_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"more than 0 samples, got 0"):
        build(lr_decay_iters=0)


def test_max_steps_builds_the_schedule_of_a_longer_run() -> None:
    scheduler = build(max_steps=200)
    assert (scheduler.lr_schedule.lr_decay_steps, scheduler.wd_schedule.wd_incr_steps) == (800, 800)
    with pytest.raises(ConfigError, match=r"max_steps must be >= train_iters \(100\), got 99"):
        build(max_steps=99)


def test_weight_decay_grows_from_start_to_end() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    scheduler = build(optimizer, start_weight_decay=0.0, end_weight_decay=0.4, weight_decay_incr_style="linear")
    scheduler.step(200)
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.2)


def test_a_users_groups_keep_their_weight_decay_and_learning_rate() -> None:
    groups = [
        {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.3},
        {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0, "lr": 0.25},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    build(optimizer, lr=None).step(200)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


def test_a_configured_learning_rate_replaces_the_optimizers() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    build(optimizer, lr=2.0)
    assert optimizer.param_groups[0]["lr"] == 2.0
