"""What follows from the values of a configuration, and what is filled in."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from onstep.config import (
    ConfigContainer,
    apply_overrides,
    from_dict,
    merge,
    parse_split,
    resolve,
    steps_of_epochs,
    steps_per_epoch,
    to_flat,
    train_iters,
    validate,
)
from onstep.errors import ConfigError


def config_with(**values: Any) -> ConfigContainer:
    """A valid configuration, changed at dotted keys written with '__'."""
    config = from_dict({"train.micro_batch_size": 4, "train.train_iters": 100, "optimizer.lr": 1e-3})
    merge(config, {key.replace("__", "."): value for key, value in values.items()})
    return config


def test_a_value_of_another_type_set_in_python_is_refused() -> None:
    config = config_with()
    config.train.train_iters = "100"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"train.train_iters='100' must be int or None"):
        validate(config)
    config = config_with()
    config.train = 3  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="train=3 must be TrainingConfig"):
        validate(config)


def test_evaluation_only_takes_no_length_and_no_learning_rate() -> None:
    validate(config_with(validation__skip_train=True, train__train_iters=None, optimizer__lr=None))


def test_no_evaluation_takes_no_evaluation_batch() -> None:
    validate(config_with(validation__eval_iters=0, validation__eval_micro_batch_size=3))


@pytest.mark.parametrize("spelling", ["bf16_mixed", "bf16-mixed", "fp16_mixed", "fp16-mixed"])
def test_a_precision_has_two_spellings_and_one_meaning(spelling: str) -> None:
    assert resolve(config_with(mixed_precision=spelling)).mixed_precision == spelling.replace("-", "_")


@pytest.mark.parametrize(
    ("values", "name", "cut"),
    [
        ({"scheduler__lr_warmup_iters": 100}, "lr_warmup_iters", 99),
        ({"scheduler__lr_warmup_fraction": 1.0}, "lr_warmup_iters", 99),
        (
            {"train__train_iters": None, "train__train_samples": 800, "scheduler__lr_warmup_samples": 800},
            "lr_warmup_samples",
            799,
        ),
    ],
)
def test_a_warmup_as_long_as_the_schedule_is_cut_with_a_warning(values: dict[str, Any], name: str, cut: int) -> None:
    config = config_with(**values)
    with pytest.warns(UserWarning, match="warm-up") as warned:
        resolved = resolve(config)
    assert len(warned) == 1
    assert (getattr(resolved.scheduler, name), resolved.scheduler.lr_warmup_fraction) == (cut, None)
    assert config == config_with(**values)
    validate(resolved)


def test_resolving_never_writes_to_the_callers_configuration() -> None:
    config = config_with(mixed_precision="bf16-mixed")
    before = copy.deepcopy(config)
    resolved = resolve(config, world_size=2)
    assert config == before
    resolved.dataset.paths.append("x")
    assert config == before


def test_resolving_fills_in_what_follows_from_other_values() -> None:
    flat = to_flat(resolve(config_with(optimizer__clip_grad=0.0, optimizer__weight_decay=0.3), world_size=2))
    expected = {
        "train.micro_batch_size": 4,
        "train.global_batch_size": 8,
        "validation.eval_micro_batch_size": 4,
        "validation.eval_global_batch_size": 8,
        "model.ffn_hidden_size": 384,
        "model.num_query_groups": 4,
        "model.kv_channels": 32,
        "optimizer.min_lr": 0.0,
        "optimizer.clip_grad": None,
        "scheduler.start_weight_decay": 0.3,
        "scheduler.end_weight_decay": 0.3,
        "rng.data_seed": 1234,
    }
    assert {key: flat[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("hidden", "gated", "ffn"), [(128, True, 384), (192, True, 512), (72, True, 192), (128, False, 512)]
)
def test_the_default_ffn_is_eight_thirds_rounded_up_to_64_or_four_without_a_gate(
    hidden: int, gated: bool, ffn: int
) -> None:
    changes = {"model__hidden_size": hidden, "model__num_attention_heads": 2, "model__gated_linear_unit": gated}
    assert resolve(config_with(**changes)).model.ffn_hidden_size == ffn


def test_the_micro_batch_follows_from_the_global_batch_and_the_ranks() -> None:
    config = config_with(train__micro_batch_size=None, train__global_batch_size=16)
    assert [resolve(config, ranks).train.micro_batch_size for ranks in (1, 2, 4)] == [16, 8, 4]


def test_resolving_twice_changes_nothing_more() -> None:
    once = resolve(config_with(), world_size=2)
    assert resolve(once, world_size=2) == once


def test_the_length_of_a_run_in_steps() -> None:
    assert train_iters(resolve(config_with())) == 100
    by_samples = resolve(config_with(train__train_iters=None, train__train_samples=403))
    assert train_iters(by_samples) == 100
    by_epochs = resolve(config_with(train__train_iters=None, train__num_epochs=1.5))
    assert train_iters(by_epochs) is None
    assert train_iters(by_epochs, num_samples_per_epoch=41) == 15


def test_the_tail_of_an_epoch_is_a_step_unless_dropped() -> None:
    assert steps_per_epoch(41, 4, drop_last=True) == 10
    assert steps_per_epoch(41, 4, drop_last=False) == 11
    assert steps_per_epoch(40, 4, drop_last=False) == 10
    assert steps_per_epoch(3, 4, drop_last=True) == 1
    assert steps_of_epochs(0.25, 41, 4, drop_last=True) == 3


def test_split_shares_are_fractions() -> None:
    assert parse_split("90,5,5") == (0.9, 0.05, 0.05)
    assert parse_split("100") == (1.0, 0.0, 0.0)
    assert parse_split(" 3, 1 ") == (0.75, 0.25, 0.0)


def test_text_numbers_set_in_python_count_as_numbers() -> None:
    config = config_with()
    config.optimizer.lr = "1e-3"  # type: ignore[assignment]
    assert resolve(config).optimizer.lr == 1e-3


def test_the_metric_is_loss_where_checkpoints_are_chosen_and_none_is_named() -> None:
    chosen = {"checkpoint__keep_best_n": 1, "checkpoint__save_interval": 10, "validation__eval_interval": 10}
    named = {"validation__metric_for_best_model": "accuracy"}
    for values, expected in ((chosen, "loss"), (chosen | named, "accuracy"), ({}, None)):
        assert resolve(config_with(run__name="a-run", **values)).validation.metric_for_best_model == expected


def test_a_threshold_without_a_limit_is_none() -> None:
    config = config_with()
    apply_overrides(config, ["optimizer.grad_norm_skip_threshold=.inf"])
    assert resolve(config).optimizer.grad_norm_skip_threshold is None
    for value in (float("nan"), float("-inf")):
        config.optimizer.grad_norm_skip_threshold = value
        with pytest.raises(ConfigError, match=r"grad_norm_skip_threshold=.* must be a finite number"):
            resolve(config)
