"""Arguments to configuration and back: what each field means, and that nothing is lost."""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from typing import Any

import pytest
import torch
import transformers

from onstep.config import (
    KEYS,
    ConfigContainer,
    TrainingArguments,
    args_to_config,
    config_to_args,
    diff,
    from_dict,
    merge,
    resolve,
    to_flat,
    validate,
)
from onstep.config.hf.accelerator import AcceleratorConfig
from onstep.config.hf.argument import KEY_OF
from onstep.config.hf.conversion import SHARES
from onstep.config.hf.reserved import reserved_fields
from onstep.errors import ConfigError


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


CHOICES: dict[str, list[Any]] = {
    "train.micro_batch_size": [1, 2, None],
    "train.global_batch_size": [8, 16],
    "train.drop_last": [True, False],
    "train.loss_weighting": ["auto", "tokens", "samples"],
    "train.manual_gc": [True, False],
    "model.num_layers": [1, 5],
    "model.kv_channels": [None, 64],
    "model.vocab_size": [None, 300],
    "optimizer.optimizer": ["adam", "sgd"],
    "optimizer.lr": [1e-3, 0.37, 5e-5],
    "optimizer.min_lr": [None, 0.0, 1e-5, 5e-5],
    "optimizer.weight_decay": [0.0, 0.01, 0.1],
    "optimizer.adam_beta2": [0.95, 0.999],
    "optimizer.sgd_momentum": [0.0, 0.9],
    "optimizer.clip_grad": [None, 0.0, 1.0, 0.3],
    "scheduler.lr_warmup_init": [0.0, 1e-6],
    "scheduler.lr_wsd_decay_style": ["linear", "cosine", "exponential", "minus_sqrt"],
    "scheduler.max_steps": [None, 700],
    "dataset.paths": [[], ["a", "b"]],
    "dataset.shuffle": [True, False],
    "dataset.num_workers": [0, 2],
    "dataset.pin_memory": [True, False],
    "dataset.persistent_workers": [True, False],
    "validation.eval_iters": [None, 0, 10],
    "validation.eval_interval": [None, 5, 50],
    "validation.start_eval_at_iter": [None, 10],
    "validation.start_eval_at_epoch": [None, 0.5],
    "validation.eval_each_epoch": [True, False],
    "validation.eval_after_training": [True, False],
    "validation.eval_global_batch_size": [None, 16],
    "validation.eval_micro_batch_size": [None, 2],
    "validation.eval_on_start": [True, False],
    "validation.metric_for_best_model": [None, "loss", "accuracy", "perplexity"],
    "validation.greater_is_better": [None, True, False],
    "logger.log_interval": [0, 1, 100],
    "logger.log_first_step": [True, False],
    "logger.log_on_each_epoch": [True, False],
    "logger.logging_level": [None, 10, 15, 30],
    "logger.logging_dir": [None, "logs"],
    "logger.report_to": [None, [], ["none"], ["all"], ["csv"], ["comet_ml", "tensorboard"]],
    "ddp.bucket_cap_mb": [25.0, 12.5, 50.0],
    "ddp.find_unused_parameters": [True, False],
    "dist.distributed_backend": [None, "gloo"],
    "dist.distributed_timeout_minutes": [10.0, 0.017, 30.0],
    "dist.device": [None, "cpu", "cuda:1"],
    "rng.seed": [0, 42, 1234],
    "rng.data_seed": [None, 7],
    "run.name": [None, "x"],
    "run.output_dir": ["runs", "/tmp/a", "."],
    "run.recipe": [None, "tiny_gpt"],
    "run.fresh": [True, False],
    "validation.eval_on_save": [True, False],
    "checkpoint.save": [None, "ckpt"],
    "checkpoint.save_interval": [None, 5, 100],
    "checkpoint.save_each_epoch": [True, False],
    "checkpoint.save_on_best": [True, False],
    "checkpoint.save_at_end": [True, False],
    "checkpoint.async_save": [True, False],
    "checkpoint.save_optim": [True, False],
    "checkpoint.save_rng": [True, False],
    "checkpoint.components": [None, ["model", "trainer"]],
    "checkpoint.resume": [True, False],
    "checkpoint.load": [None, "other/checkpoint-7"],
    "checkpoint.exit_on_missing_checkpoint": [True, False],
    "checkpoint.most_recent_k": [-1, 1, 3],
    "checkpoint.keep_best_n": [0, 1, 2],
    "checkpoint.load_best_model_at_end": [True, False],
    "mixed_precision": [None, "bf16_mixed", "bf16-mixed", "fp16_mixed", "fp16-mixed"],
    "env_vars": [{}, {"A": "1"}],
    "trainer": [{}, {"label_names": ["labels"], "optim": "adamw_torch"}, {"seed": 99, "warmup_steps": 0.5}],
}
TOGETHER: list[list[dict[str, Any]]] = [
    [
        {"train.train_iters": 500},
        {"train.train_iters": 500, "scheduler.lr_decay_iters": 400},
        {"train.num_epochs": 2.5},
        {"train.train_samples": 4000, "scheduler.lr_warmup_samples": 400},
    ],
    [
        *({"scheduler.lr_decay_style": style} for style in ("constant", "linear", "cosine", "inverse-square-root")),
        {"scheduler.lr_decay_style": "WSD", "scheduler.lr_wsd_decay_iters": 30},
    ],
    [{}, {"scheduler.lr_warmup_iters": 20}, {"scheduler.lr_warmup_fraction": 0.1}],
    [{}, {"scheduler.start_weight_decay": 0.0, "scheduler.end_weight_decay": 0.1}],
    [{"model.seq_length": 64, "dataset.seq_length": 64}, {}],
]


def random_valid_config(seed: int) -> ConfigContainer:
    """A configuration of random values that keeps every rule; tries until one does."""
    rng = random.Random(seed)
    while True:
        values = {key: rng.choice(choices) for key, choices in CHOICES.items() if rng.random() < 0.6}
        for alternatives in TOGETHER:
            values |= rng.choice(alternatives)
        values.setdefault("optimizer.lr", 1e-3)
        values.setdefault("train.global_batch_size", 8)
        if "scheduler.end_weight_decay" in values:
            values["scheduler.weight_decay_incr_style"] = rng.choice(["linear", "cosine"])
        config = from_dict(values)
        try:
            validate(config)
        except ConfigError:
            continue
        return config


@pytest.mark.parametrize("first", range(0, 80, 20))
@pytest.mark.parametrize("world_size", [1, 4])
def test_config_to_args_to_config_is_the_identity(first: int, world_size: int) -> None:
    for seed in range(first + world_size, first + 20, 2):
        config = random_valid_config(seed)
        for written in (config, resolve(config)):
            args = config_to_args(written, world_size=world_size)
            assert diff(written, args_to_config(args, world_size=world_size)) == [], seed


def test_the_default_configuration_is_identical_too() -> None:
    assert args_to_config(config_to_args(ConfigContainer())) == ConfigContainer()


_FSDP_DEFAULTS = {"xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False, "min_num_params": 0}
HIDDEN = "hub_token"
"""The argument that no configuration has, as configurations are written to files."""
OTHER_VALUES: dict[str, Any] = {
    "output_dir": "out/run-7",
    "per_device_train_batch_size": 3,
    "num_train_epochs": 2.5,
    "max_steps": 321,
    "learning_rate": 0.37,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0.07,
    "optim": "adamw_torch",
    "optim_args": "",  # each optimizer reads others: see tests/trainer/test_named_optimizers.py
    "optim_target_modules": [],
    "weight_decay": 0.2,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "gradient_accumulation_steps": 5,
    "max_grad_norm": 0.0,
    "bf16": True,
    "fp16": True,
    "logging_strategy": "epoch",
    "logging_steps": 11,
    "logging_first_step": True,
    "log_on_each_node": False,
    "log_level": "detail",
    "log_level_replica": "error",
    "logging_nan_inf_filter": False,
    "include_num_input_tokens_seen": "all",
    "skip_memory_metrics": False,
    "save_on_each_node": True,
    "disable_tqdm": True,
    "run_name": "name for people",
    "eval_strategy": "epoch",
    "eval_steps": 13,
    "eval_delay": 1.5,
    "per_device_eval_batch_size": 6,
    "prediction_loss_only": True,
    "eval_on_start": True,
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["loss"],
    "eval_do_concat_batches": False,
    "eval_use_gather_object": True,
    "batch_eval_metrics": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "overwrite_output_dir": True,
    "save_only_model": True,
    "save_strategy": "epoch",
    "save_steps": 17,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "accuracy",
    "greater_is_better": False,
    "seed": 1,
    "data_seed": 2,
    "use_cpu": True,
    "dataloader_drop_last": True,
    "dataloader_num_workers": 3,
    "dataloader_pin_memory": False,
    "dataloader_persistent_workers": True,
    "remove_unused_columns": False,
    "label_names": ["labels"],
    "train_sampling_strategy": "group_by_length",
    "group_by_length": True,
    "length_column_name": "tokens",
    "dataloader_prefetch_factor": 4,
    "push_to_hub": True,
    "hub_model_id": "me/model",
    "hub_private_repo": True,
    "hub_strategy": "end",
    "hub_always_push": True,
    "hub_revision": "main",
    "dataloader_multiprocessing_context": "spawn",
    "accelerator_config": AcceleratorConfig(use_seedable_sampler=False),
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 30,
    "ddp_broadcast_buffers": True,
    "ddp_backend": "gloo",
    "ddp_timeout": 100,
    "ddp_static_graph": True,
    "fsdp": True,
    "fsdp_config": {**_FSDP_DEFAULTS, "reshard_after_forward": False},
    "parallelism_config": {"dp_shard_size": 1},
    "tf32": False,
    "full_determinism": True,
    "torch_compile": True,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "max-autotune",
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "use_cache": True,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": False},
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 2,
    "auto_find_batch_size": True,
    "debug": ["underflow_overflow"],
    "do_train": True,
    "do_eval": True,
    "do_predict": True,
    "resume_from_checkpoint": False,
    "local_rank": 1,
    "mixed_precision": "bf16",
    "max_eval_steps": 4,
    "logging_dir": "logs",
    "restore_callback_states_from_checkpoint": True,
    "enable_jit_checkpoint": True,
    "eval_on_save": True,
    "preserve_best_model": True,
    "preserve_n_best": 3,
    "best_model_metric": "accuracy",
    "best_model_greater_is_better": False,
    "checkpoint_components": ["model", "trainer"],
    "report_to": ["csv", "comet"],
    "project": "my-project",
    "trackio_space_id": "me/space",
    "trackio_bucket_id": "me/bucket",
}
RESERVED = {field.name: field for field in reserved_fields()}
HF_DEFAULTS = {field.name: default_of(field) for field in dataclasses.fields(transformers.TrainingArguments)}
OWN_VALUES: dict[str, Any] = {"config_overrides": {"model.num_layers": 7, "run.fresh": True}, "control": True}
NEEDED: dict[str, dict[str, Any]] = {
    "dataloader_prefetch_factor": {"dataloader_num_workers": 2},
    "fsdp_config": {"fsdp": True},
}
FORGATHER_DEFAULTS = {
    "max_eval_steps": -1,
    "epoch_train_steps": 100000,
    "speed_metrics_start_step": 1,
    "set_dataset_epoch": True,
    "gc_threshold": 0.5,
    "eval_on_save": False,
    "preserve_best_model": False,
    "preserve_n_best": 1,
    "best_model_metric": "loss",
    "best_model_greater_is_better": None,
    "checkpoint_components": None,
    "fuse_optim_with_backward": False,
    "group_by_length": False,
    "mixed_precision": None,
    "logging_dir": None,
    "overwrite_output_dir": False,
    "save_safetensors": True,
}
ARGUMENTS = {field.name: field for field in dataclasses.fields(TrainingArguments) if field.init}


def made(**values: Any) -> TrainingArguments:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return TrainingArguments(**values)


def test_the_names_are_hugging_faces_and_forgathers_and_each_has_another_value_or_none() -> None:
    assert set(ARGUMENTS) == {*HF_DEFAULTS, *FORGATHER_DEFAULTS}
    assert set(OTHER_VALUES) == set(ARGUMENTS) - set(RESERVED) - {HIDDEN}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_has_its_default_and_an_effect_or_a_refusal(name: str) -> None:
    """For every argument: its own default is the default; another value is refused by name, or survives conversion."""
    default = default_of(ARGUMENTS[name])
    assert default == {**HF_DEFAULTS, **FORGATHER_DEFAULTS}[name]
    assert TrainingArguments(**{name: default}) == TrainingArguments()
    if name in RESERVED:
        with pytest.raises(ConfigError, match=rf"TrainingArguments\.{name}=.* is not supported yet") as error:
            TrainingArguments(**{name: "something else"})
        assert f"leave it at its default {default!r}" in str(error.value)
        return
    if name == HIDDEN:
        assert args_to_config(TrainingArguments(hub_token="secret")) == args_to_config(TrainingArguments())
        return
    args = made(**{name: OTHER_VALUES[name]}, **NEEDED.get(name, {}))
    config = args_to_config(args)
    again = config_to_args(config)
    assert getattr(again, name) == getattr(args, name) == OTHER_VALUES[name]
    assert again == args
    if name != "lr_scheduler_kwargs":  # a key of its own, or `trainer` where only the Trainer can act on it
        assert config != args_to_config(TrainingArguments())


@pytest.mark.parametrize("name", OWN_VALUES)
def test_an_argument_that_is_not_a_field_survives_conversion_and_copies(name: str) -> None:
    args = made(**{name: OWN_VALUES[name]})
    copies = (
        config_to_args(args_to_config(args)),
        dataclasses.replace(args, seed=3),
        TrainingArguments(**args.to_dict()),
    )
    for copied in copies:
        assert getattr(copied, name) == getattr(args, name) == OWN_VALUES[name]
    assert not getattr(TrainingArguments(), name)


def test_a_reserved_argument_that_a_key_names_has_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hf=` at the key is the only edit that gives one of Hugging Face's arguments its effect."""
    monkeypatch.setitem(KEY_OF, "fuse_optim_with_backward", KEYS["train.manual_gc"])
    config = args_to_config(TrainingArguments(fuse_optim_with_backward=True))
    assert config.train.manual_gc is True
    assert config_to_args(config).fuse_optim_with_backward is True


def test_args_to_config_to_args_keeps_all_fields_at_once() -> None:
    args = made(**{**OTHER_VALUES, "mixed_precision": None, "fp16": False, "fp16_full_eval": False})
    assert config_to_args(args_to_config(args)) == args


def test_random_arguments_survive_the_round_trip() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        excluded = ("mixed_precision", "fp16", "fp16_full_eval")
        names = [name for name in OTHER_VALUES if rng.random() < 0.4 and name not in excluded]
        needed = {key: value for name in names for key, value in NEEDED.get(name, {}).items()}
        args = made(**{name: OTHER_VALUES[name] for name in names} | needed)
        assert config_to_args(args_to_config(args, world_size=2), world_size=2) == args, seed


def test_report_to_is_an_argument_and_a_key() -> None:
    config = args_to_config(TrainingArguments(report_to=["csv", "comet_ml"], project="mine"))
    assert config.logger.report_to == ["csv", "comet"]
    assert config.trainer == {"project": "mine"}
    args = config_to_args(from_dict({"logger.report_to": ["wandb"]}))
    assert (args.report_to, args.config_overrides and args.config_overrides.get("logger.report_to")) == (
        ["wandb"],
        None,
    )


def test_defaults_need_neither_trainer_nor_overrides() -> None:
    config = args_to_config(TrainingArguments())
    assert config.trainer == {}
    assert config_to_args(config).config_overrides is None
    validate(config)


def test_the_defaults_mean_hugging_faces_run() -> None:
    flat = to_flat(args_to_config(TrainingArguments(), world_size=2))
    expected = {
        "run.output_dir": ".",
        "run.name": "trainer_output",
        "train.micro_batch_size": 8,
        "train.global_batch_size": 16,
        "train.num_epochs": 3.0,
        "train.train_iters": None,
        "train.drop_last": False,
        "optimizer.optimizer": "adam",
        "optimizer.lr": 5e-5,
        "optimizer.min_lr": None,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_grad": 1.0,
        "scheduler.lr_decay_style": "linear",
        "scheduler.lr_warmup_iters": 0,
        "validation.eval_interval": None,
        "validation.eval_each_epoch": False,
        "validation.eval_after_training": False,
        "validation.eval_iters": None,
        "validation.eval_global_batch_size": 16,
        "logger.log_interval": 500,
        "checkpoint.save_interval": 500,
        "checkpoint.save_at_end": True,
        "checkpoint.most_recent_k": -1,
        "checkpoint.resume": True,
        "checkpoint.load": None,
        "train.exit_signal_handler": True,
        "dataset.num_workers": 0,
        "dataset.persistent_workers": False,
        "dist.distributed_timeout_minutes": 30.0,
        "rng.seed": 42,
        "mixed_precision": None,
    }
    assert {key: flat[key] for key in expected} == expected


HALF = {
    "mixed_precision": "fp16_mixed",
    "optimizer.initial_loss_scale": 65536.0,
    "optimizer.loss_scale_window": 2000,
    "optimizer.hysteresis": 1,
}
"""The scale of torch's GradScaler, not Megatron's."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"output_dir": "out/a"}, {"run.output_dir": "out", "run.name": "a"}),
        ({"output_dir": "/out/a/"}, {"run.output_dir": "/out", "run.name": "a"}),
        ({"max_steps": 7}, {"train.train_iters": 7, "train.num_epochs": None}),
        ({"gradient_accumulation_steps": 4}, {"train.micro_batch_size": 8, "train.global_batch_size": 32}),
        ({"max_grad_norm": 0}, {"optimizer.clip_grad": None}),
        ({"max_grad_norm": None}, {"optimizer.clip_grad": None}),
        ({"optim": "sgd"}, {"optimizer.optimizer": "sgd", "optimizer.sgd_momentum": 0.0}),
        ({"bf16": True}, {"mixed_precision": "bf16_mixed"}),
        ({"mixed_precision": "bf16"}, {"mixed_precision": "bf16_mixed"}),
        ({"fp16": True}, HALF),
        ({"mixed_precision": "fp16"}, HALF),
        ({"mixed_precision": "no"}, {"mixed_precision": None}),
        ({"logging_strategy": "no"}, {"logger.log_interval": 0, "logger.log_on_each_epoch": False}),
        ({"logging_strategy": "epoch"}, {"logger.log_interval": 0, "logger.log_on_each_epoch": True}),
        ({"logging_steps": 0.1, "max_steps": 95}, {"logger.log_interval": 10}),
        (
            {"eval_strategy": "steps", "logging_steps": 20},
            {"validation.eval_interval": 20, "validation.eval_after_training": True},
        ),
        ({"eval_strategy": "steps", "eval_steps": 0.25, "max_steps": 10}, {"validation.eval_interval": 3}),
        ({"eval_strategy": "steps", "eval_delay": 30}, {"validation.start_eval_at_iter": 30}),
        (
            {"eval_strategy": "epoch", "eval_delay": 1.5},
            {"validation.eval_each_epoch": True, "validation.start_eval_at_epoch": 1.5},
        ),
        ({"max_eval_steps": 9}, {"validation.eval_iters": 9}),
        ({"warmup_steps": 12}, {"scheduler.lr_warmup_iters": 12}),
        ({"warmup_steps": 0.07}, {"scheduler.lr_warmup_fraction": 0.07, "scheduler.lr_warmup_iters": 0}),
        ({"warmup_steps": 0.07, "max_steps": 99}, {"scheduler.lr_warmup_iters": 7}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 9}, {"scheduler.lr_warmup_iters": 0}),
        ({"ddp_timeout": 90}, {"dist.distributed_timeout_minutes": 1.5}),
        ({"use_cpu": True}, {"dist.device": "cpu"}),
        ({"log_level": "info"}, {"logger.logging_level": 20}),
        (
            {"save_strategy": "no"},
            {"checkpoint.save_interval": None, "checkpoint.save_each_epoch": False, "checkpoint.save_at_end": False},
        ),
        (
            {"save_strategy": "epoch"},
            {"checkpoint.save_interval": None, "checkpoint.save_each_epoch": True, "checkpoint.save_at_end": True},
        ),
        (
            {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "accuracy"},
            {"checkpoint.save_on_best": True, "checkpoint.save_interval": None, "checkpoint.save_at_end": False},
        ),
        ({"save_steps": 0.1, "max_steps": 95}, {"checkpoint.save_interval": 10}),
        ({"save_total_limit": 3}, {"checkpoint.most_recent_k": 3}),
        ({"save_only_model": True}, {"checkpoint.save_optim": False, "checkpoint.save_rng": False}),
        ({"checkpoint_components": ["model"]}, {"checkpoint.components": ["model"]}),
        (
            {"load_best_model_at_end": True},
            {"checkpoint.load_best_model_at_end": True, "validation.metric_for_best_model": "loss"},
        ),
        ({"preserve_n_best": 3}, {"checkpoint.keep_best_n": 0}),
        (
            {"preserve_best_model": True, "preserve_n_best": 2, "best_model_metric": "accuracy"},
            {"checkpoint.keep_best_n": 2, "validation.metric_for_best_model": "accuracy"},
        ),
        (
            {"preserve_best_model": True, "best_model_greater_is_better": True},
            {"validation.metric_for_best_model": "loss", "validation.greater_is_better": True},
        ),
        ({"preserve_best_model": True, "metric_for_best_model": "f1"}, {"validation.metric_for_best_model": "f1"}),
        ({"eval_on_save": True}, {"validation.eval_on_save": True}),
        ({"resume_from_checkpoint": True}, {"checkpoint.resume": True, "checkpoint.load": None}),
        ({"resume_from_checkpoint": False}, {"checkpoint.resume": False, "checkpoint.load": None}),
        (
            {"resume_from_checkpoint": "o/checkpoint-5"},
            {"checkpoint.resume": True, "checkpoint.load": "o/checkpoint-5"},
        ),
        ({"enable_jit_checkpoint": False}, {"train.exit_signal_handler": True}),
        ({"metric_for_best_model": "accuracy"}, {"validation.greater_is_better": None}),
        ({"train_sampling_strategy": "sequential"}, {"dataset.shuffle": False}),
        ({"label_names": ["y"]}, {"trainer": {"label_names": ["y"]}}),
        ({"config_overrides": {"model": {"num_layers": 2}, "optimizer.lr": 1}}, {"model.num_layers": 2}),
        ({"config_overrides": {"optimizer.lr": 1}, "learning_rate": 2.0}, {"optimizer.lr": 1.0}),
    ],
)
def test_arguments_mean_what_hugging_face_means(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    flat = to_flat(args_to_config(made(**arguments)))
    assert {key: flat[key] for key in expected} == expected


def test_a_share_of_a_run_by_epochs_takes_the_length_of_the_data() -> None:
    args = TrainingArguments(logging_steps=0.1, num_train_epochs=2, warmup_steps=0.05)
    with pytest.raises(ConfigError, match=r"logging_steps=0.1 is a share of the run, whose length .* not known"):
        args_to_config(args)
    config = args_to_config(args, num_samples_per_epoch=404)  # 51 steps of 8 an epoch
    assert config.logger.log_interval == math.ceil(102 * 0.1)
    assert config.scheduler.lr_warmup_iters == math.ceil(102 * 0.05)
    assert config_to_args(config).logging_steps == 11


def test_only_shares_of_a_run_come_back_as_steps() -> None:
    assert SHARES == ("logging_steps", "eval_steps", "save_steps")
    args = TrainingArguments(eval_strategy="steps", eval_steps=0.25, max_steps=100)
    assert config_to_args(args_to_config(args)).eval_steps == 25


def test_a_mistyped_override_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"'optimizer.lrr'. Did you mean 'optimizer.lr'"):
        args_to_config(TrainingArguments(config_overrides={"optimizer.lrr": 1}))


def test_a_foreign_key_in_trainer_is_refused() -> None:
    config = from_dict({"trainer": {"label_name": ["x"]}, "optimizer.lr": 1.0, "train.train_iters": 1})
    config.train.micro_batch_size = 1
    with pytest.raises(ConfigError, match=r"no argument 'label_name'. Did you mean 'label_names'"):
        validate(config)


def test_a_value_assigned_after_construction_is_checked() -> None:
    args = TrainingArguments()
    args.fsdp = "no_shard"
    with pytest.raises(ConfigError, match="fsdp: 'no_shard' must be one of full_shard"):
        args_to_config(args)


def test_conversions_repeat_no_warning() -> None:
    args = made(save_steps=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_to_args(args_to_config(args)).save_steps == 5


def test_a_changed_configuration_wins_over_the_spelling_of_the_arguments() -> None:
    config = args_to_config(TrainingArguments(optim="adamw_torch", max_steps=50, num_train_epochs=7))
    merge(config, {"optimizer.optimizer": "sgd", "optimizer.sgd_momentum": 0.0})
    merge(config, {"train.train_iters": None, "train.num_epochs": 2.0})
    args = config_to_args(config)
    assert (args.optim, args.num_train_epochs, args.max_steps) == ("sgd", 2.0, -1)
    assert args_to_config(args) == config


def learning_rate(config: ConfigContainer, step: int, total: int) -> float:
    """The learning rate after `step` steps by the formulae of the scheduler's specification."""
    scheduler, top, low = config.scheduler, config.optimizer.lr or 0.0, config.optimizer.min_lr or 0.0
    warmup = scheduler.lr_warmup_iters
    if warmup and step <= warmup:
        return scheduler.lr_warmup_init + (top - scheduler.lr_warmup_init) * step / warmup
    if scheduler.lr_decay_style == "constant":
        return top
    if scheduler.lr_decay_style == "inverse-square-root":
        return max(low, top * math.sqrt(warmup) / math.sqrt(step))
    if scheduler.lr_decay_style == "WSD":
        length = scheduler.lr_wsd_decay_iters or 1
        done = max(0.0, (step - (total - length)) / length)
        shapes = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "minus_sqrt": 1 - math.sqrt(done)}
        return low + (top - low) * shapes[scheduler.lr_wsd_decay_style]
    done = (step - warmup) / (total - warmup)
    share = 1 - done if scheduler.lr_decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return low + (top - low) * share


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("linear", None),
        ("cosine", None),
        ("cosine", {"num_cycles": 0.5}),
        ("cosine_with_min_lr", {"min_lr": 1e-5}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("constant", None),
        ("constant_with_warmup", None),
        ("inverse_sqrt", None),
        ("warmup_stable_decay", {"num_decay_steps": 20}),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "linear", "min_lr_ratio": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
    ],
)
@pytest.mark.parametrize("warmup_steps", [0, 7, 0.07])
def test_a_schedule_follows_hugging_faces_curve(name: str, kwargs: dict[str, Any] | None, warmup_steps: float) -> None:
    if name == "inverse_sqrt":
        warmup_steps = warmup_steps or 1  # without a warm-up it is refused, see below
    total = 99
    args = TrainingArguments(
        lr_scheduler_type=name,
        lr_scheduler_kwargs=kwargs,
        warmup_steps=warmup_steps,
        learning_rate=0.01,
        max_steps=total,
    )
    config = args_to_config(args)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    theirs = transformers.get_scheduler(
        name, optimizer, args.get_warmup_steps(total), total, scheduler_specific_kwargs=kwargs
    )
    for step in range(total):
        assert learning_rate(config, step, total) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6, abs=1e-12), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "requires lr_scheduler_kwargs with one of min_lr, min_lr_rate"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
        ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs of 'linear' has 'power'"),
    ],
)
def test_keywords_that_a_schedule_lacks_or_does_not_read_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        args_to_config(TrainingArguments(**arguments))
