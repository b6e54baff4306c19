"""`fsdp`, `fsdp_config` and `parallelism_config`: what they make of the sections `parallel` and `fsdp`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from onstep.config import ConfigContainer, TrainingArguments, args_to_config
from onstep.config.hf.conversion import config_to_args
from onstep.config.parallel_sizes import ParallelSizes
from onstep.config.sections.fsdp import FullyShardedConfig
from onstep.errors import ConfigError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("FSDP_", "PARALLELISM_CONFIG_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # restored afterwards, as the arguments set it


def configured(**values: Any) -> ConfigContainer:
    return args_to_config(TrainingArguments(**values), world_size=4)


@pytest.mark.parametrize(
    ("fsdp", "found"),
    [
        (True, {}),
        ("true", {}),
        ("full_shard auto_wrap", {}),
        ("shard_grad_op", {"reshard_after_forward": False}),
        (["full_shard", "offload"], {"cpu_offload": True}),
        ("hybrid_shard", {}),
        ("hybrid_shard_zero2 offload", {"reshard_after_forward": False, "cpu_offload": True}),
    ],
)
def test_options_of_fsdp(fsdp: object, found: dict[str, Any]) -> None:
    config = configured(fsdp=fsdp)
    assert config.parallel.data_parallel_shard_size == -1
    assert config.fsdp == FullyShardedConfig(**found)


@pytest.mark.parametrize("fsdp", [None, "", False, [], "false"])
def test_without_fsdp_nothing_is_sharded(fsdp: object) -> None:
    args = TrainingArguments(fsdp=fsdp)
    assert args.parallel_sizes == ParallelSizes(dp_replicate=4)
    assert args.fsdp_plugin_args is None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": "false"}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": 2}, {"reshard_after_forward": 2}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        ({"offload_params": True}, {"cpu_offload": True}),
        ({"transformer_layer_cls_to_wrap": "Block"}, {"wrap": ["Block"]}),
        ({"transformer_layer_cls_to_wrap": "Block,Other"}, {"wrap": ["Block", "Other"]}),
        ({"transformer_layer_cls_to_wrap": ["Block"]}, {"wrap": ["Block"]}),
        ({"forward_prefetch": True}, {"prefetch": 1}),
        ({"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "use_orig_params": True, "xla": False}, {}),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "backward_prefetch": "backward_pre"}, {}),
    ],
)
@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_keys_of_fsdp_config_in_a_dictionary_and_a_file(
    tmp_path: Path, prefix: str, given: dict[str, Any], found: dict[str, Any]
) -> None:
    named = {prefix + name: value for name, value in given.items()}
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps(named))
    for config in (configured(fsdp=True, fsdp_config=named), configured(fsdp=True, fsdp_config=str(path))):
        assert config.fsdp == FullyShardedConfig(**found)
        assert args_to_config(config_to_args(config, world_size=4), world_size=4) == config


def test_recomputation_and_loading_follow_fsdp_config() -> None:
    switches = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
    args = TrainingArguments(fsdp=True, fsdp_config={**switches, "cpu_ram_efficient_loading": "true"})
    assert args.activation_checkpointing is args.gradient_checkpointing is True
    assert args.activation_checkpointing_kwargs == {"offload": True}
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fsdp": "no_shard"}, "fsdp: 'no_shard' must be one of full_shard, .*; without shards: drop fsdp"),
        ({"fsdp": 3}, "fsdp must be True, options or a list of them, got 3"),
        ({"fsdp_config": {"version": 2}}, "requires fsdp=True"),
        ({"fsdp": True, "fsdp_config": "missing.json"}, "got 'missing.json': No such file"),
        ({"fsdp": True, "fsdp_config": 3}, "must be a dictionary or a JSON file with one, got 3"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, r"\['version'\]=1 must be 2: .* fully_shard"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, r"\['xla'\]=True must be False: there is no XLA"),
        ({"fsdp": True, "fsdp_config": {"min_num_params": 9}}, r"\['min_num_params'\]=9 must be 0: .*_cls_to_wrap"),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}, r"'NO_WRAP' must be 'TRANSFORMER_BASED_WRAP'"),
        ({"fsdp": True, "fsdp_config": {"use_orig_params": False}}, r"\['use_orig_params'\]=False must be True"),
        ({"fsdp": True, "fsdp_config": {"backward_prefetch": "BACKWARD_POST"}}, "must be 'BACKWARD_PRE'"),
        ({"fsdp": True, "fsdp_config": {"mixed_precision_policy": "bf16"}}, "pass bf16=True or fp16=True"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": "maybe"}}, r"\['cpu_offload'\]='maybe' must be true or false"),
        ({"fsdp": True, "fsdp_config": {"reshard_after": True}}, "not a key of fsdp_config. Did you mean 'reshard_aft"),
        ({"parallelism_config": 4}, "must be accelerate's ParallelismConfig or a dictionary of its fields, got 4"),
        ({"parallelism_config": {"cp_size": 2}}, "cp_size=2 must be 1: context parallelism comes with a later version"),
        ({"parallelism_config": {"tp_size": -1}}, "tp_size=-1 must be a number of ranks"),
        ({"parallelism_config": {"shard": 2}}, "shard=2: there is no such field"),
        (
            {"parallelism_config": {"dp_shard_size": 3}},
            r"^parallelism_config\['dp_shard_size'\]=3 must be the number of ran",
        ),
        (
            {"config_overrides": {"parallel.data_parallel_shard_size": 3}},
            r"^config_overrides\['parallel\S+'\]=3 does not",
        ),
        (
            {"config_overrides": {"parallel": {"data_parallel_shard_size": 3}}},
            r"^config_overrides\['parallel\.\S+'\]=3 d",
        ),
        (
            {"parallelism_config": {"dp_replicate_size": 4}, "fsdp": True},
            "contradicts parallelism_config: dp_",
        ),
    ],
)
def test_what_has_no_effect_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(**values)


def test_hybrid_shards_are_those_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert TrainingArguments(fsdp="hybrid_shard").parallel_sizes == ParallelSizes(dp_replicate=2, dp_shard=2)
    assert TrainingArguments(fsdp="full_shard").parallel_sizes == ParallelSizes(dp_shard=4)


def test_sizes_are_those_of_parallelism_config_or_of_the_overrides() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    both = ParallelSizes(dp_replicate=2, dp_shard=2)
    given = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    args = TrainingArguments(parallelism_config=given, fsdp=True)
    assert args.parallel_sizes == both
    assert args.parallelism_config is given
    assert args.to_dict()["parallelism_config"] == {"dp_replicate_size": 2, "dp_shard_size": 2}
    config = args_to_config(args, world_size=4)
    assert config.trainer["parallelism_config"] == {"dp_replicate_size": 2, "dp_shard_size": 2}
    assert config.parallel_sizes(4) == both
    for overrides in ({"parallel.data_parallel_shard_size": 2}, {"parallel": {"data_parallel_shard_size": 2}}):
        assert TrainingArguments(config_overrides=overrides).parallel_sizes == both
    assert TrainingArguments(parallelism_config={"dp_replicate_size": 4}).parallel_sizes.dp_replicate == 4


def test_accelerate_launch_fills_in_what_the_arguments_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
        "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    asked = FullyShardedConfig(wrap=["Block"], reshard_after_forward=False, cpu_offload=True)
    assert configured().fsdp == asked
    assert TrainingArguments().parallel_sizes == ParallelSizes(dp_replicate=2, dp_shard=2)
    own = configured(fsdp=True, fsdp_config={"reshard_after_forward": True, "cpu_offload": False})
    assert own.fsdp == FullyShardedConfig(wrap=["Block"])
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    with pytest.raises(ConfigError, match="SIZE_BASED_WRAP' must be 'TRANSFORMER"):
        TrainingArguments()
