"""What a configuration is refused for before any work starts, and what is filled in."""

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


def test_a_plain_configuration_is_valid() -> None:
    validate(config_with())
    validate(config_with(train__global_batch_size=16), world_size=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "train.global_batch_size=10",
            r"=10 must be a multiple of micro_batch_size \* ranks = 4 \* 2 = 8; choose 8 or 16",
        ),
        ("train.global_batch_size=6", r"choose 8\."),
        ("train.micro_batch_size=null", "the batch has no size"),
        ("train.micro_batch_size=0", "train.micro_batch_size=0 must be > 0"),
        ("train.micro_batch_size=null train.global_batch_size=3", r"multiple of ranks = 2; choose 2 or 4"),
        ("train.train_samples=1000", "train.train_iters=100 and train.train_samples=1000 are both lengths"),
        ("train.train_iters=null", "the run has no length"),
        ("train.train_iters=null train.train_samples=7", "less than one step"),
        ("train.train_iters=-5", "train.train_iters=-5 must be > 0"),
        ("train.loss_weighting=token", "must be auto | tokens | samples | microbatches. Did you mean 'tokens'"),
        ("train.on_nonfinite=ignore", "train.on_nonfinite='ignore' must be raise | stop | skip | rollback"),
        ("optimizer.lr=null", "optimizer.lr is not set"),
        ("optimizer.lr=-1e-3", "optimizer.lr=-0.001 must be >= 0"),
        ("optimizer.lr=.nan", "optimizer.lr=nan must be a finite number"),
        ("optimizer.min_lr=1.0", "optimizer.min_lr=1.0 must be at most optimizer.lr=0.001"),
        ("optimizer.clip_grad=-1.0", "optimizer.clip_grad=-1.0 must be >= 0"),
        ("optimizer.adam_beta2=1.0", "optimizer.adam_beta2=1.0 must be at least 0 and below 1"),
        ("optimizer.optimizer=adamw", "Did you mean 'adam'"),
        ("scheduler.lr_decay_style=cosin", "scheduler.lr_decay_style='cosin' .*Did you mean 'cosine'"),
        ("scheduler.lr_decay_style=WSD", "set scheduler.lr_wsd_decay_iters"),
        ("scheduler.lr_decay_style=WSD scheduler.lr_wsd_decay_iters=200", "WSD decay .* is longer"),
        ("scheduler.lr_warmup_samples=8", "lr_warmup_samples=8 does not fit a run whose length is train.train_iters"),
        ("train.train_iters=null train.train_samples=800 scheduler.lr_decay_iters=8", "set scheduler.lr_decay_samples"),
        ("scheduler.lr_warmup_fraction=0.1 scheduler.lr_warmup_iters=3", "given twice"),
        ("scheduler.lr_warmup_fraction=1.5", "must be between 0 and 1"),
        ("scheduler.max_steps=50", "scheduler.max_steps=50 must be at least the run's 100 steps"),
        ("scheduler.start_weight_decay=0.1", "constant requires start_weight_decay == end_weight_decay"),
        ("scheduler.weight_decay_incr_style=linear", "requires scheduler.start_weight_decay <= end_weight_decay"),
        ("model.seq_length=128", "dataset.seq_length=256 and model.seq_length=128 must be the same"),
        ("model.hidden_size=130", "model.hidden_size=130 must be a multiple of num_attention_heads=4"),
        ("model.num_query_groups=3", "must be a multiple of num_query_groups=3"),
        ("model.kv_channels=7", "a head is 7, and rotary embeddings require an even width"),
        ("dataset.split=90,5,5,1", "dataset.split='90,5,5,1' must be the shares"),
        ("dataset.split=0,50,50", "leaves nothing to train on"),
        ("tokenizer.tokenizer_type=huggingface", "tokenizer.tokenizer_model"),
        ("validation.eval_global_batch_size=6", r"=6 must be a multiple of eval_micro_batch_size \* ranks"),
        ("validation.eval_micro_batch_size=3 train.global_batch_size=8", r"eval_micro_batch_size \* ranks = 3 \* 2"),
        ("validation.eval_interval=0", "validation.eval_interval=0 must be > 0"),
        ("logger.log_interval=-1", "logger.log_interval=-1 must be >= 0"),
        ("mixed_precision=fp16", "Did you mean 'fp16"),
        ("mixed_precision=bf16", "Did you mean 'bf16"),
        ("dist.device=gpu", "dist.device='gpu' must be cpu, cuda"),
        ("dist.device=cpu dist.distributed_backend=nccl", "requires GPUs"),
        ("run.name=a/b", "run.name='a/b' must be the name of a directory"),
    ],
)
def test_a_broken_rule_names_value_and_remedy(overrides: str, message: str) -> None:
    config = config_with()
    apply_overrides(config, overrides.split())
    with pytest.raises(ConfigError, match=message.replace(" | ", r" \| ")):
        validate(config, world_size=2)


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


def test_a_warmup_as_long_as_the_schedule_is_cut_with_a_warning() -> None:
    config = config_with(scheduler__lr_warmup_iters=100)
    with pytest.warns(UserWarning, match="warm-up") as warned:
        resolved = resolve(config)
    assert len(warned) == 1
    assert resolved.scheduler.lr_warmup_iters == 99
    assert config.scheduler.lr_warmup_iters == 100
    validate(resolved)


def test_a_warmup_fraction_of_everything_is_cut() -> None:
    with pytest.warns(UserWarning, match="warm-up"):
        resolved = resolve(config_with(scheduler__lr_warmup_fraction=1.0))
    assert (resolved.scheduler.lr_warmup_fraction, resolved.scheduler.lr_warmup_iters) == (None, 99)


def test_a_warmup_in_samples_is_cut_to_one_sample_less() -> None:
    config = config_with(train__train_iters=None, train__train_samples=800, scheduler__lr_warmup_samples=800)
    with pytest.warns(UserWarning, match="warm-up"):
        resolved = resolve(config)
    assert resolved.scheduler.lr_warmup_samples == 799


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


@pytest.mark.parametrize(("hidden", "ffn"), [(128, 384), (192, 512), (72, 192), (96, 256)])
def test_the_default_ffn_is_eight_thirds_rounded_up_to_64(hidden: int, ffn: int) -> None:
    resolved = resolve(config_with(model__hidden_size=hidden, model__num_attention_heads=2))
    assert resolved.model.ffn_hidden_size == ffn


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


def test_overrides_are_validated_like_everything_else() -> None:
    config = config_with()
    apply_overrides(config, ["optimizer.lr=-1"])
    with pytest.raises(ConfigError, match=r"optimizer.lr=-1.0 must be >= 0"):
        validate(config)
