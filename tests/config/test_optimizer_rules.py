"""Settings of the optimizer that cannot work together are refused before anything is built."""

from __future__ import annotations

from typing import Any

import pytest

from onstep.config import ConfigContainer, apply_overrides, resolve, validate
from onstep.errors import ConfigError


def configured(**changes: Any) -> ConfigContainer:
    config = ConfigContainer()
    config.train.train_iters, config.train.micro_batch_size = 10, 2
    config.optimizer.lr, config.optimizer.min_lr = 0.1, 0.01
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer__decoupled_lr": 0.001}, "at most 0.001 .* must not end above that, got 0.01"),
        ({"optimizer__decoupled_min_lr": 0.2}, "at most 0.1 .* got 0.2 .*; set optimizer.decoupled_min_lr"),
        ({"optimizer__muon_num_ns_steps": 100}, "muon_num_ns_steps=100 must be from 1 to 99"),
        (
            {"scheduler__override_opt_param_scheduler": True, "scheduler__use_checkpoint_opt_param_scheduler": True},
            "are both true, but a checkpoint's schedule can only be kept or replaced",
        ),
        ({"optimizer__grad_norm_skip_threshold": 0.0}, "grad_norm_skip_threshold=0.0 must be > 0"),
    ],
    ids=str,
)
def test_what_cannot_work_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(configured(**changes))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"lr_mult": 0.1}, r"param_groups\[0\].match=None must be a pattern"),
        ({"match": "", "lr_mult": 0.1}, "match='' must be a pattern"),
        ({"match": "*"}, r"\(match='\*'\) sets nothing; give it one of lr_mult"),
        ({"match": "*", "lr_mul": 0.1}, "no key 'lr_mul'. Did you mean 'lr_mult'"),
        ({"match": "*", "lr_mult": -1}, r"param_groups\[0\].lr_mult=-1 must be a finite number >= 0"),
        ({"match": "*", "wd_mult": "no"}, "wd_mult='no' must be a finite number"),
        ({"match": "*", "lr_mult": float("inf")}, "lr_mult=inf must be a finite number"),
        ({"match": "*", "wd_mult": True}, "wd_mult=True must be a finite number"),
        ({"match": "*", "max_lr": 0.001}, "max_lr=0.001 must be at least min_lr=0.01"),
        ({"match": "*", "min_lr": 0.3}, "max_lr=0.1 must be at least min_lr=0.3"),
        ({"match": "*", "start_wd": 0.3}, "weight decay must not shrink, got start_wd=0.3 and end_wd=0.01"),
        ({"match": "*", "end_wd": 0.3}, "weight decay must stay, with .*=constant, got start_wd=0.01 and end_wd=0.3"),
    ],
    ids=str,
)
def test_an_entry_that_no_parameter_could_follow_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(configured(optimizer__param_groups=[entry]))


def test_what_works_is_accepted() -> None:
    entries = [{"match": "*.router.*", "lr_mult": 0.1, "wd_mult": 0}, {"match": "*", "max_lr": 1, "min_lr": None}]
    validate(configured(optimizer__param_groups=entries, optimizer__decoupled_lr=0.02))
    validate(configured(optimizer__param_groups=[{"match": "*", "start_wd": 0.2, "end_wd": 0.2}]))


def test_a_threshold_without_a_limit_is_none() -> None:
    config = configured()
    apply_overrides(config, ["optimizer.grad_norm_skip_threshold=.inf"])
    assert resolve(config).optimizer.grad_norm_skip_threshold is None
    for value in (float("nan"), float("-inf")):
        with pytest.raises(ConfigError, match=r"grad_norm_skip_threshold=.* must be a finite number"):
            resolve(configured(optimizer__grad_norm_skip_threshold=value))


def test_entries_can_be_written_on_the_command_line() -> None:
    config = configured()
    apply_overrides(config, ["optimizer.param_groups=[{match: '*.bias', wd_mult: 1.0}]"])
    validate(config)
    assert config.optimizer.param_groups == [{"match": "*.bias", "wd_mult": 1.0}]
