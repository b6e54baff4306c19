"""The scheduler that writes into parameter groups: overrides, state, and the schedules of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onstep.errors import ConfigError
from onstep.optim import OptimizerParamScheduler, TrainingOptimizer


def make(optimizer: Any = None, **changes: Any) -> OptimizerParamScheduler:
    """Warm-up over 10 samples to 1, linear decay to 0 at 110, weight decay 0.1."""
    values = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.0,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 110,
        "lr_decay_style": "linear",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 100,
        "wd_incr_style": "constant",
    }
    return OptimizerParamScheduler(optimizer or sgd(), **(values | changes))


def saved_at_60() -> dict[str, Any]:
    """The state of the schedule in the middle of its decay, where the rate is 0.5."""
    scheduler = make()
    scheduler.step(60)
    return scheduler.state_dict()


def sgd(*groups: dict[str, Any]) -> torch.optim.SGD:
    """An optimizer with one parameter for each of `groups`."""
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], **group} for group in groups or ({},)], lr=7.0)


def test_constructor_writes_the_values_at_zero_samples() -> None:
    optimizer = sgd()
    make(optimizer, init_lr=0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_step_counts_samples_and_writes_what_get_lr_says() -> None:
    optimizer = sgd({}, {})
    scheduler = make(optimizer)
    rates = []
    for _ in range(3):
        scheduler.step(20)
        rates.append(optimizer.param_groups[1]["lr"])
        assert rates[-1] == scheduler.get_lr(optimizer.param_groups[0])
    assert scheduler.num_steps == 60
    assert rates == pytest.approx([0.9, 0.7, 0.5], rel=1e-14)


def test_learning_rate_does_not_depend_on_how_the_count_was_reached() -> None:
    by_ones, at_once = make(), make()
    for _ in range(37):
        by_ones.step(1)
    at_once.step(37)
    assert by_ones.get_lr({}) == at_once.get_lr({})


def test_group_overrides_count_for_that_group_only() -> None:
    optimizer = sgd({}, {"max_lr": 0.5, "min_lr": 0.1, "wd_mult": 0.0}, {"start_wd": 0.0, "end_wd": 0.4})
    scheduler = make(optimizer, wd_incr_style="linear", end_wd=0.3)
    scheduler.step(60)
    common, slower, own_decay = optimizer.param_groups
    assert (common["lr"], slower["lr"], own_decay["lr"]) == pytest.approx((0.5, 0.3, 0.5))
    assert (common["weight_decay"], slower["weight_decay"]) == pytest.approx((0.22, 0.0))
    assert own_decay["weight_decay"] == pytest.approx(0.24)
    assert scheduler.get_wd(slower) == pytest.approx(0.22)
    assert scheduler.get_wd() == pytest.approx(0.22)


def test_weight_decay_is_not_given_to_an_optimizer_without_it() -> None:
    optimizer = torch.optim.Rprop([nn.Parameter(torch.ones(2))])
    make(optimizer).step(20)
    assert "weight_decay" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9)


def test_tensor_learning_rate_is_written_in_place() -> None:
    rate = torch.tensor(7.0)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=rate, fused=True)
    make(optimizer).step(60)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_lr_factor_takes_effect_at_once_and_lasts() -> None:
    optimizer = sgd({}, {"max_lr": 0.5})
    scheduler = make(optimizer)
    scheduler.step(10)
    scheduler.lr_factor = 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    scheduler.step(50)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
    assert scheduler.get_lr({}) == 0.25


def test_it_schedules_a_training_optimizer_after_its_groups_were_reloaded() -> None:
    optimizer = TrainingOptimizer(sgd())
    scheduler = make(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step(60)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_state_has_the_keys_of_megatron_core_and_its_start_and_plain_values() -> None:
    scheduler = make()
    scheduler.step(30)
    assert scheduler.state_dict() == {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "lr_warmup_steps": 10,
        "num_steps": 30,
        "lr_decay_style": "linear",
        "lr_decay_steps": 110,
        "min_lr": 0.0,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_style": "constant",
        "wd_incr_steps": 100,
    }


def test_loading_continues_where_the_state_was_saved_and_adds_to_the_present_count() -> None:
    loaded, later = make(optimizer := sgd()), make()
    loaded.load_state_dict(saved_at_60())
    assert (loaded.num_steps, optimizer.param_groups[0]["lr"]) == (60, 0.5)
    later.step(20)
    later.load_state_dict(saved_at_60())
    assert later.num_steps == 80


def test_checkpoint_values_are_taken_over_by_default_and_own_are_kept_with_override() -> None:
    loaded = make(max_lr=3.0, lr_decay_style="cosine")
    loaded.load_state_dict(saved_at_60())
    assert (loaded.get_lr({}), loaded.state_dict()) == (0.5, saved_at_60())
    own = make(max_lr=2.0, use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    own.load_state_dict(saved_at_60())
    assert own.get_lr({}) == 1.0


def test_without_either_option_equal_schedules_load_and_another_is_refused_and_changes_nothing() -> None:
    equal = make(use_checkpoint_opt_param_scheduler=False)
    equal.load_state_dict(saved_at_60())
    assert equal.num_steps == 60
    loaded = make(lr_decay_steps=210, use_checkpoint_opt_param_scheduler=False)
    before = loaded.state_dict()
    with pytest.raises(ConfigError, match="lr_decay_steps must be 110, as in the checkpoint, got 210"):
        loaded.load_state_dict(saved_at_60())
    assert loaded.state_dict() == before


WSD = {"lr_decay_style": "WSD", "wsd_decay_steps": 40, "lr_wsd_decay_style": "linear"}


@pytest.mark.parametrize(
    ("name", "other"), [("init_lr", 0.5), ("wsd_decay_steps", 80), ("lr_wsd_decay_style", "cosine")]
)
def test_the_start_and_the_end_of_wsd_are_part_of_the_schedule(name: str, other: Any) -> None:
    saved = make(**WSD)
    saved.step(85)
    changed = WSD | {name: other}
    with pytest.raises(ConfigError, match=rf"{name} must be .*, as in the checkpoint"):
        make(**changed, use_checkpoint_opt_param_scheduler=False).load_state_dict(saved.state_dict())
    loaded = make(**changed)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.state_dict() == saved.state_dict()
    assert loaded.get_lr({}) == saved.get_lr({}) == 0.625
    own = make(**changed, use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    own.load_state_dict(saved.state_dict())
    assert own.state_dict()[name] == other


def test_the_checkpoints_wsd_holds_where_another_style_is_configured() -> None:
    saved, loaded = make(**WSD), make()
    saved.step(85)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.get_lr({}) == 0.625


def test_a_state_of_an_older_version_leaves_what_it_did_not_know() -> None:
    saved = make(**WSD)
    state = {key: value for key, value in saved.state_dict().items() if key not in (*WSD, "init_lr")}
    loaded = make(**WSD, init_lr=0.25, use_checkpoint_opt_param_scheduler=False)
    loaded.load_state_dict(state | {"lr_decay_style": "WSD"})
    assert (loaded.lr_schedule.init_lr, loaded.lr_schedule.wsd_decay_steps) == (0.25, 40)


def test_a_state_without_a_count_is_refused() -> None:
    with pytest.raises(ConfigError, match="must hold num_steps"):
        make().load_state_dict({"max_lr": 1.0})


def test_override_and_use_checkpoint_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="both True"):
        make(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)


@pytest.mark.parametrize(
    ("style", "name", "options"),
    [
        ("linear", "get_linear_schedule_with_warmup", {"num_training_steps": 110}),
        ("cosine", "get_cosine_schedule_with_warmup", {"num_training_steps": 110}),
        ("constant", "get_constant_schedule_with_warmup", {}),
    ],
)
def test_schedule_is_that_of_transformers(style: str, name: str, options: dict[str, int]) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    theirs, ours = sgd(), sgd()
    for group in theirs.param_groups:
        group["lr"] = 0.3
    their_schedule = getattr(optimization, name)(theirs, num_warmup_steps=10, **options)
    our_schedule = make(ours, max_lr=0.3, lr_decay_style=style)
    for step in range(111):
        expected = pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12, abs=1e-17)
        assert ours.param_groups[0]["lr"] == expected, step
        theirs.step()
        their_schedule.step()
        our_schedule.step(1)


def test_cosine_without_warm_up_is_that_of_torch() -> None:
    theirs, ours = sgd(), sgd()
    their_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(theirs, T_max=100, eta_min=0.5)
    our_schedule = make(ours, max_lr=7.0, min_lr=0.5, lr_warmup_steps=0, lr_decay_steps=100, lr_decay_style="cosine")
    for _ in range(100):
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
        theirs.step()
        their_schedule.step()
        our_schedule.step(1)
