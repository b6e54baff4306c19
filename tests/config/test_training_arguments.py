"""`TrainingArguments` has the names and defaults of Hugging Face's, and refuses what it does not do."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from onstep.config import TrainingArguments, UnknownArgumentError, args_to_config
from onstep.config.hf.checks import check_best_model
from onstep.errors import ConfigError
from onstep.trainer.own_arguments import own_arguments


def test_what_hugging_faces_own_dictionary_holds_is_accepted() -> None:
    theirs = transformers.TrainingArguments("out", use_cpu=True, max_steps=5, eval_strategy="steps", warmup_steps=0.1)
    ours = TrainingArguments(**theirs.to_dict())
    assert (ours.output_dir, ours.max_steps, ours.eval_steps, ours.do_eval) == ("out", 5, 500, True)
    assert ours.warmup_steps == 0.1


def test_a_token_is_not_shown() -> None:
    args = TrainingArguments(hub_token="hf_secret")
    assert args.hub_token == "hf_secret"
    assert "hf_secret" not in f"{args!r} {args} {args.to_dict()} {args_to_config(args)}"
    assert TrainingArguments(**args.to_dict()).hub_token is None
    theirs = transformers.TrainingArguments("out", use_cpu=True, hub_token="hf_secret")
    assert own_arguments(theirs).hub_token == "hf_secret"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"deepspeed": "zero3.json"}, r"deepspeed='zero3.json' is not supported yet .*leave it at its default None"),
        ({"fp16": True, "bf16": True}, r"bf16=True contradicts fp16=True"),
        ({"fp16": True, "mixed_precision": "bf16"}, r"fp16=True contradicts mixed_precision='bf16'"),
        ({"fp16": True, "mixed_precision": "no"}, r"fp16=True contradicts mixed_precision='no'"),
        ({"optim": "adamw_tosch"}, r"optim='adamw_tosch' .*Did you mean 'adamw_torch'"),
        ({"optim": "adamw_torch_xla"}, r"optim='adamw_torch_xla' is not supported: it is for XLA devices"),
        ({"optim_args": "momentum"}, r"optim_args='momentum' must be 'name=value,...', got 'momentum'"),
        (
            {"lr_scheduler_type": "exponential"},
            r"lr_scheduler_type='exponential' is not supported; use one of 'linear'",
        ),
        ({"eval_strategy": "step"}, r"eval_strategy='step' .*Did you mean 'steps'"),
        ({"mixed_precision": "fp8"}, r"mixed_precision='fp8' is not supported"),
        ({"ddp_backend": "mpi"}, r"ddp_backend='mpi' is not supported"),
        ({"bf16": True, "mixed_precision": "no"}, r"bf16=True contradicts mixed_precision='no'"),
        ({"learning_rate": "fast"}, r"learning_rate='fast' must be float"),
        ({"max_steps": 2.5}, r"max_steps=2.5 must be int"),
        ({"per_device_train_batch_size": 0}, r"per_device_train_batch_size=0 must be > 0"),
        ({"warmup_steps": -1}, r"warmup_steps=-1 must be >= 0"),
        ({"num_train_epochs": 0}, r"num_train_epochs=0.0 must be > 0"),
        ({"num_train_epochs": 1e308}, r"num_train_epochs=1e\+308 must be > 0 and at most 1,000,000,000; for a length"),
        ({"logging_steps": 0}, r"logging_steps=0 must be > 0 with the strategy 'steps'"),
        ({"logging_steps": 2.5}, r"logging_steps=2.5 must be an integer \(steps\), or below 1"),
        ({"save_total_limit": 0}, r"save_total_limit=0 would keep no checkpoint; use None for all, or at least 1"),
        ({"save_total_limit": -1}, r"save_total_limit=-1 would keep no checkpoint"),
        ({"preserve_n_best": 0}, r"preserve_n_best=0 must be > 0"),
        ({"save_steps": 0}, r"save_steps=0 must be > 0 with the strategy 'steps'; use 'no' for never"),
        ({"save_steps": 2.5}, r"save_steps=2.5 must be an integer \(steps\), or below 1"),
        ({"save_strategy": "bests"}, r"save_strategy='bests' .*Did you mean 'best'"),
        ({"ignore_data_skip": True}, r"ignore_data_skip=True .*at the very sample"),
        ({"save_safetensors": False}, r"save_safetensors=False .*never a pickle"),
        ({"include_for_metrics": ["logits"]}, r"'logits'; use 'inputs' and 'loss'"),
        ({"average_tokens_across_devices": False}, r"average_tokens_across_devices=False is not supported"),
        ({"report_to": "wnadb"}, r"report_to='wnadb' is not a tracker; use 'none', .*Did you mean 'wandb'"),
        ({"report_to": ["csv", "codecarbon"]}, r"report_to='codecarbon' is not a tracker; use 'none'"),
        ({"report_to": ["csv", "none"]}, r"'none' with trackers; drop one or the other"),
    ],
)
def test_a_value_that_cannot_work_is_refused_at_construction(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"report_to": []},
        {"report_to": None},
        {"gradient_checkpointing": False},
        {"save_strategy": "no"},
        {"disable_tqdm": True},
        {"remove_unused_columns": False},
        {"resume_from_checkpoint": True},
        {"resume_from_checkpoint": False},
        {"resume_from_checkpoint": "out/checkpoint-5"},
        {"restore_callback_states_from_checkpoint": True},
        {"enable_jit_checkpoint": True},
        {"max_grad_norm": None},
        {"learning_rate": "3e-4"},
        {"local_rank": 3},
    ],
)
def test_what_means_the_default_or_has_an_effect_is_accepted(values: dict[str, Any]) -> None:
    TrainingArguments(**values)


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ("none", []),
        (None, []),
        (["none"], []),
        ("all", ["all"]),
        (["csv", "all"], ["all"]),
        ("wandb", ["wandb"]),
        ("comet_ml", ["comet"]),
        (["comet", "comet_ml", "csv"], ["comet", "csv"]),
        (("csv", "mlflow"), ["csv", "mlflow"]),
    ],
)
def test_report_to_becomes_a_list_of_trackers(given: Any, settled: list[str]) -> None:
    assert TrainingArguments(report_to=given).report_to == settled


def test_what_hugging_face_makes_of_all_is_accepted() -> None:
    theirs = transformers.TrainingArguments("out", use_cpu=True, report_to=["tensorboard", "comet_ml", "trackio"])
    assert TrainingArguments(**theirs.to_dict()).report_to == ["tensorboard", "comet", "trackio"]


def test_an_unknown_keyword_is_a_type_error_that_names_the_nearest() -> None:
    with pytest.raises(UnknownArgumentError, match=r"no argument 'learning_rat'. Did you mean 'learning_rate'\?"):
        TrainingArguments(learning_rat=1e-3)  # type: ignore[call-arg]
    for name, ours in {"lr": "learning_rate", "clip_grad": "max_grad_norm", "log_interval": "logging_steps"}.items():
        with pytest.raises(UnknownArgumentError, match=rf"no argument '{name}'\. Use {ours}\."):
            TrainingArguments(**{name: 1})  # type: ignore[arg-type]
    assert issubclass(UnknownArgumentError, TypeError)
    assert issubclass(UnknownArgumentError, ConfigError)


def test_a_name_of_older_transformers_says_what_to_use() -> None:
    with pytest.raises(TypeError, match="Use warmup_steps: below 1 it is a share of the run"):
        TrainingArguments(warmup_ratio=0.1)  # type: ignore[call-arg]


def test_the_metric_of_the_best_model_is_loss_unless_named() -> None:
    assert TrainingArguments().metric_for_best_model is None
    for asked in ({"load_best_model_at_end": True}, {"preserve_best_model": True}):
        args = TrainingArguments(**asked)
        assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    args = TrainingArguments(load_best_model_at_end=True, metric_for_best_model="accuracy")
    assert (args.metric_for_best_model, args.greater_is_better) == ("accuracy", True)
    args = TrainingArguments(preserve_best_model=True, best_model_metric="accuracy", best_model_greater_is_better=False)
    assert (args.metric_for_best_model, args.greater_is_better) == ("accuracy", False)


MEETING: list[dict[str, Any]] = [
    {"eval_strategy": "steps", "eval_steps": 50, "save_steps": 100},
    {"eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 0.3},
    {"eval_strategy": "epoch", "save_strategy": "epoch"},
    {"eval_strategy": "steps", "eval_steps": 30, "save_strategy": "best"},
]
MISSING: list[dict[str, Any]] = [
    {},
    {"eval_strategy": "epoch"},
    {"eval_strategy": "steps", "save_strategy": "epoch"},
    {"eval_strategy": "steps", "eval_steps": 100, "save_steps": 50},
    {"eval_strategy": "steps", "eval_steps": 0.1, "save_steps": 50},
    {"eval_strategy": "steps", "eval_steps": 0.3, "save_steps": 0.1},
]


@pytest.mark.parametrize("options", MEETING)
def test_saves_that_meet_evaluations_may_choose_the_best_model_as_in_transformers(options: dict[str, Any]) -> None:
    transformers.TrainingArguments(use_cpu=True, load_best_model_at_end=True, **options)
    check_best_model(TrainingArguments(load_best_model_at_end=True, **options))
    check_best_model(TrainingArguments(preserve_best_model=True, **{"metric_for_best_model": "loss", **options}))


@pytest.mark.parametrize("options", MISSING)
def test_saves_that_miss_evaluations_cannot_choose_the_best_model_as_in_transformers(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="load_best_model_at_end requires"):
        transformers.TrainingArguments(use_cpu=True, load_best_model_at_end=True, **options)
    with pytest.raises(ConfigError, match=r"load_best_model_at_end=True requires checkpoints of evaluated steps, got"):
        check_best_model(TrainingArguments(load_best_model_at_end=True, **options))
    with pytest.raises(ConfigError, match=r"preserve_best_model=True requires checkpoints of evaluated steps, got"):
        check_best_model(TrainingArguments(preserve_best_model=True, **options))


def test_eval_on_save_lets_any_save_choose_the_best_model() -> None:
    check_best_model(TrainingArguments(preserve_best_model=True, eval_on_save=True, save_steps=7))
    with pytest.raises(ConfigError, match="eval_strategy='no' and save_strategy='no'"):
        check_best_model(TrainingArguments(load_best_model_at_end=True, save_strategy="no"))
    with pytest.raises(ConfigError, match="save_strategy='no'"):
        check_best_model(TrainingArguments(preserve_best_model=True, eval_on_save=True, save_strategy="no"))


def test_what_overrides_change_about_checkpoints_is_left_to_the_rules_of_the_configuration() -> None:
    check_best_model(
        TrainingArguments(load_best_model_at_end=True, config_overrides={"checkpoint": {"save_on_best": True}})
    )
    with pytest.raises(ConfigError, match="requires checkpoints of evaluated steps"):
        check_best_model(TrainingArguments(load_best_model_at_end=True, config_overrides={"run.fresh": True}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_strategy": "best"}, "save_strategy='best' requires metric_for_best_model"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "requires evaluations; set eval_strategy"),
        (
            {"preserve_best_model": True, "best_model_metric": "f1", "metric_for_best_model": "loss"},
            "best_model_metric='f1' contradicts metric_for_best_model='loss'",
        ),
    ],
)
def test_a_best_model_that_nothing_can_choose_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_best_model(TrainingArguments(**options))


def test_the_output_directory_may_be_given_by_position() -> None:
    assert TrainingArguments("out/here", max_steps=5).output_dir == "out/here"
    assert TrainingArguments().output_dir == transformers.TrainingArguments(use_cpu=True).output_dir


def test_unset_eval_steps_are_logging_steps() -> None:
    args = TrainingArguments(eval_strategy="steps", logging_steps=7)
    assert (args.eval_steps, args.do_eval) == (7, True)


def test_enum_members_are_kept_as_their_values() -> None:
    args = TrainingArguments(
        lr_scheduler_type=transformers.SchedulerType.COSINE,  # type: ignore[arg-type]
        eval_strategy=transformers.IntervalStrategy.EPOCH,  # type: ignore[arg-type]
    )
    assert (args.lr_scheduler_type, args.eval_strategy) == ("cosine", "epoch")
    assert type(args.eval_strategy) is str
    assert args.eval_strategy == transformers.IntervalStrategy.EPOCH


@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 7.9, 0.1, 0.07, 0.333])
def test_warmup_steps_are_those_of_hugging_face(warmup_steps: float) -> None:
    theirs = transformers.TrainingArguments(use_cpu=True, warmup_steps=warmup_steps)
    ours = TrainingArguments(warmup_steps=warmup_steps)
    lengths = (1, 10, 99, 100, 1000)
    assert [ours.get_warmup_steps(n) for n in lengths] == [theirs.get_warmup_steps(n) for n in lengths]


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    args = TrainingArguments(use_cpu=True)
    assert (args.world_size, args.process_index, args.local_process_index) == (1, 0, 0)
    assert (args.should_log, args.should_save, args.device.type, args.n_gpu) == (True, True, "cpu", 0)
    for name, value in {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert (args.world_size, args.process_index, args.local_process_index) == (8, 4, 0)
    assert (args.should_log, args.should_save) == (True, False)
    assert not TrainingArguments(log_on_each_node=False).should_log


def test_batch_sizes_are_those_of_one_rank() -> None:
    args = TrainingArguments(per_device_train_batch_size=3, per_device_eval_batch_size=5)
    assert (args.train_batch_size, args.eval_batch_size) == (3, 5)


def test_the_dictionary_is_json_and_rebuilds_the_arguments() -> None:
    args = TrainingArguments("out", max_steps=5, label_names=["labels"])
    assert json.loads(args.to_json_string()) == args.to_dict()
    again = {name: value for name, value in args.to_dict().items() if not name.endswith("_token")}
    assert TrainingArguments(**again) == args


def test_arguments_are_an_ordinary_dataclass() -> None:
    args = TrainingArguments("out", max_steps=5)
    changed = dataclasses.replace(args, learning_rate=1e-3)
    assert (changed.learning_rate, changed.max_steps, args.learning_rate) == (1e-3, 5, 5e-5)
    assert dataclasses.asdict(changed)["learning_rate"] == 1e-3


def test_assigned_values_are_checked_again_on_demand() -> None:
    args = TrainingArguments()
    args.learning_rate = math.inf
    with pytest.raises(ConfigError, match="learning_rate=inf"):
        args.check()


def test_a_subclass_may_add_fields() -> None:
    @dataclasses.dataclass(kw_only=True)
    class MyArguments(TrainingArguments):
        temperature: float = 1.0

    assert MyArguments("out", temperature=0.5).temperature == 0.5


def test_an_attribute_that_is_almost_an_argument_is_named(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path))
    arguments.my_own_setting = arguments._note = 1  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="no argument 'learnig_rate', so setting it changes nothing.*'learning_rate'"):
        arguments.learnig_rate = 3.0  # type: ignore[attr-defined]
    arguments.learnig_rate = 4.0  # type: ignore[attr-defined]
    assert arguments.learning_rate == 5e-5
