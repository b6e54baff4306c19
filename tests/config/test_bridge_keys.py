"""Megatron Bridge's configurations: six of its recipes key by key, its YAML, its objects, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from onstep.config import (
    KEYS,
    ConfigContainer,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    apply_overrides,
    explain,
    from_dict,
    resolve,
    to_flat,
    validate,
)
from onstep.config.bridge import effects
from onstep.config.bridge.rules import Rule
from onstep.config.bridge_outcomes import outcome, rules
from onstep.config.checks import check_parallel
from onstep.config.keys import typed_copy
from onstep.config.later_parts import LATER_PARTS
from onstep.errors import ConfigError
from onstep.recipes import get_recipe
from onstep.training.comm_overlap import CommOverlapConfig
from onstep.training.config import GPTDatasetConfig
from onstep.training.mixed_precision import MixedPrecisionConfig, bf16_mixed, fp16_mixed, get_mixed_precision_config
from tests.support.contract.bridge_recipes import RECIPES, REFUSED, nested, of_recipe

FIRST = "qwen25_500m"

# Recipes, key by key


@pytest.mark.parametrize("name", RECIPES)
def test_each_key_of_a_recipe_has_an_effect_is_neutral_or_is_refused_by_what_it_is(name: str) -> None:
    kinds: dict[str, str] = {}
    for key, value in RECIPES[name].items():
        if key.endswith("_target_"):
            continue
        kinds[key] = outcome(key, value).kind
        if name != FIRST and value == RECIPES[FIRST].get(key, ...):
            continue  # read with the first recipe
        alone = nested({key: value})
        if kinds[key] == "refused":
            with pytest.raises(ConfigError, match=rf"^{key}=.* must be .*: .*; .*\.$"):
                from_dict(alone)
        else:
            from_dict(alone)
    assert {key for key, kind in kinds.items() if kind == "refused"} == REFUSED[name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_whole_recipe_loads_and_its_own_keys_have_its_values(name: str) -> None:
    config = resolve(from_dict(of_recipe(name)))
    other = {
        "dataset.split", "tokenizer.vocab_size", "model.rope_scaling", "model.activation_func", "train.manual_gc_eval",
        "tokenizer.tokenizer_type", "train.exit_signal", "model.moe_grouped_gemm", "rng.data_seed",
        "optimizer.params_dtype", "optimizer.main_params_dtype", "optimizer.exp_avg_dtype",
        "optimizer.exp_avg_sq_dtype",
    }  # fmt: skip
    for key, value in RECIPES[name].items():
        if key in KEYS and key not in other and value is not None and key not in REFUSED[name]:
            assert KEYS[key].get(config) == value, key
    assert config.validation.eval_interval == RECIPES[name]["train.eval_interval"]
    assert config.dataset.seq_length == config.model.seq_length == RECIPES[name]["model.seq_length"]
    assert config.train.manual_gc_eval is True


def test_a_recipe_with_keys_that_are_not_supported_names_them_all() -> None:
    with pytest.raises(ConfigError, match=r"^model.context_parallel_size=2 must be 1: context parallelism is not"):
        from_dict(nested(RECIPES["llama3_8b"]))
    with pytest.raises(ConfigError, match=r"Also not supported: .*model.window_size"):
        from_dict(nested(RECIPES["gemma2_2b"]))


def test_a_recipe_of_bridge_and_onsteps_of_that_name_are_the_same_model() -> None:
    theirs, ours = resolve(from_dict(of_recipe("qwen25_500m"))), resolve(get_recipe("qwen25_500m")())
    own = {"model.make_vocab_size_divisible_by"}
    different = [key for key in KEYS if key.startswith("model.") and KEYS[key].get(theirs) != KEYS[key].get(ours)]
    assert {*different} <= own


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_distributed_optimizer_of_a_recipe_acts_on_any_number_of_ranks(overlaps: bool) -> None:
    config = from_dict(of_recipe(FIRST))
    apply_overrides(config, [f"ddp.overlap_{what}={str(overlaps).lower()}" for what in ("grad_reduce", "param_gather")])
    config = resolve(config)
    for ranks in (1, 2, 8):
        check_parallel(config, ranks)
    sizes = config.parallel_sizes(8)
    assert config.ddp.use_distributed_optimizer
    assert (sizes.dp_shard, sizes.dp_replicate) == (8, 1)
    assert (config.ddp.check_for_nan_in_grad, config.ddp.grad_reduce_in_fp32) == (True, False)
    assert (config.mixed_precision, config.optimizer.main_params_dtype) == ("bf16_mixed", "float32")


# Effects under another name


EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "train.eval_interval": (7, {"validation.eval_interval": 7}),
    "train.eval_iters": (3, {"validation.eval_iters": 3}),
    "train.skip_train": (True, {"validation.skip_train": True}),
    "model.bf16": (True, {"mixed_precision": "bf16_mixed"}),
    "model.fp16": (True, {"mixed_precision": "fp16_mixed"}),
    "optimizer.bf16": (True, {"mixed_precision": "bf16_mixed"}),
    "optimizer.fp16": (True, {"mixed_precision": "fp16_mixed"}),
    "model.deterministic_mode": (True, {"train.deterministic": True}),
    "model.seq_len_interpolation_factor": (2, {"model.rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "dataset.sequence_length": (64, {"dataset.seq_length": 64}),
    "dataset.random_seed": (5, {"rng.data_seed": 5}),
    "dataset.path_to_cache": ("cache", {"dataset.cache_dir": "cache"}),
    "dataset.blend": (
        [["a", "b"], [0.25, 0.75]],
        {"dataset.kind": "megatron", "dataset.paths": ["a", "b"], "dataset.weights": [0.25, 0.75]},
    ),
    "dataset.reset_position_ids": (True, {"dataset.reset_attention_mask": True}),
    "ddp.bucket_size": (2**20, {"ddp.bucket_cap_mb": 4.0}),
    "dist.distributed_timeout_seconds_after_init": (45.0, {"dist.timeout_after_first_step": 45.0}),
    "dist.use_torch_fsdp2": (True, {"parallel.data_parallel_shard_size": -1}),
    "model.tensor_model_parallel_size": (2, {"parallel.tensor_model_parallel_size": 2}),
    "model.sequence_parallel": (True, {"parallel.sequence_parallel": True}),
    "straggler.enable_straggler_on_startup": (False, {"straggler.disable_straggler_on_startup": True}),
}
"""A value of each key, and what it sets."""
TOGETHER = {
    "model.rope_scaling_factor",
    "optimizer.muon_use_nesterov",
    "optimizer.muon_scale_mode",
    "optimizer.muon_extra_scale_factor",
    "model.params_dtype",
    *(f"model.{name}" for name in LATER_PARTS),
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.pipeline_model_parallel_layout",
    "model.account_for_embedding_in_pipeline_split",
    "model.account_for_loss_in_pipeline_split",
}
"""Keys whose effect needs others, with tests of their own."""


def test_every_effect_has_a_test() -> None:
    assert {key for key, rule in rules() if rule.becomes} == {*EFFECTS, *TOGETHER}
    assert all({*dict(rules())[key].becomes} == {*sets} for key, (_, sets) in EFFECTS.items())


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_sets_what_it_is_called_here(key: str) -> None:
    value, sets = EFFECTS[key]
    section, _, name = key.partition(".")
    by_file = from_dict({section: {name: value}})
    by_override, by_attribute, in_a_new_section = ConfigContainer(), ConfigContainer(), ConfigContainer()
    apply_overrides(by_override, [f"{key}={json.dumps(value)}"])
    setattr(getattr(by_attribute, section), name, value)
    setattr(in_a_new_section, section, type(getattr(by_file, section))(**{name: value}))
    before = to_flat(ConfigContainer())
    for config in (by_file, by_override, by_attribute, in_a_new_section):
        assert {one: now for one, now in to_flat(config).items() if now != before[one]} == sets


@pytest.mark.parametrize("key", [key for key in EFFECTS if key != "dataset.blend"])
def test_a_key_with_an_effect_is_read_as_it_was_set(key: str) -> None:
    value, section, name = EFFECTS[key][0], *key.split(".")
    config = ConfigContainer()
    setattr(getattr(config, section), name, value)
    assert getattr(getattr(config, section), name) == value
    config.validation.eval_interval = 9
    assert config.train.eval_interval == 9  # type: ignore[attr-defined]


def test_a_copy_sets_its_own_values_and_never_the_originals() -> None:
    config = ConfigContainer()
    for copied in (copy.deepcopy(config), resolve(get_recipe("tiny_gpt")())):
        copied.train.eval_interval = 3  # type: ignore[attr-defined]
        assert copied.validation.eval_interval == 3
    section = typed_copy(config.train)
    section.eval_interval = 3  # type: ignore[attr-defined]
    assert config.validation.eval_interval is None
    resolved = resolve(
        from_dict({"train": {"eval_interval": 5, "train_iters": 9, "micro_batch_size": 1}, "optimizer": {"lr": 1}})
    )
    assert resolved.validation.eval_interval == 5


def test_the_last_of_two_names_of_one_key_holds() -> None:
    config = ConfigContainer()
    config.train.eval_interval = 3  # type: ignore[attr-defined]
    config.validation.eval_interval = 4
    assert resolve_small(config).validation.eval_interval == 4
    config.train.eval_interval = 6  # type: ignore[attr-defined]
    assert resolve_small(config).validation.eval_interval == 6


def resolve_small(config: ConfigContainer) -> ConfigContainer:
    config.train.train_iters, config.train.micro_batch_size, config.optimizer.lr = 20, 1, 1e-3
    return resolve(config)


def test_mixed_precision_decides_where_it_is_set() -> None:
    config = ConfigContainer(mixed_precision="fp16_mixed")
    config.model.bf16 = True  # type: ignore[attr-defined]
    assert config.mixed_precision == "fp16_mixed"


def test_rope_scaling_is_that_of_llama3_with_its_factor_in_any_order() -> None:
    for order in (("rope_scaling", "rope_scaling_factor"), ("rope_scaling_factor", "rope_scaling")):
        values: dict[str, Any] = {"rope_scaling": True, "rope_scaling_factor": 32.0}
        config = ConfigContainer()
        for name in order:
            setattr(config.model, name, values[name])
        assert config.model.rope_scaling == {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config.model.rope_scaling = False  # type: ignore[assignment]
        assert config.model.rope_scaling is None


def test_the_models_type_of_weights_holds_over_the_optimizers() -> None:
    run = {"train.train_iters": 1, "train.micro_batch_size": 1, "train.global_batch_size": 1, "optimizer.lr": 0.1}
    recipe = nested({"model.params_dtype": "torch.bfloat16", "optimizer.params_dtype": "torch.float32", **run})
    assert resolve(from_dict(recipe)).optimizer.params_dtype == "bfloat16"
    precision = ConfigContainer(mixed_precision=MixedPrecisionConfig(bf16=True, params_dtype=torch.bfloat16))  # type: ignore[arg-type]
    apply_overrides(precision, [f"{key}={value}" for key, value in run.items()])
    assert resolve(precision).optimizer.params_dtype == "bfloat16"


def test_an_object_for_the_precision_says_how_gradients_are_summed() -> None:
    for given, in_bf16, summed in ((True, False, True), (False, False, False), (True, True, False)):
        config = ConfigContainer(mixed_precision=MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=given))  # type: ignore[arg-type]
        config.ddp.grad_reduce_in_bf16 = in_bf16
        assert resolve_small(config).ddp.grad_reduce_in_fp32 is summed


@pytest.mark.parametrize("flag", ["use_distributed_optimizer", "overlap_param_gather"])
@pytest.mark.parametrize("section", ["ddp", "optimizer"])
def test_a_flag_of_two_sections_is_enabled_in_both_with_a_warning_on_rank_0(
    section: str, flag: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, warned in (("1", 0), ("0", 1)):
        monkeypatch.setattr(effects, "_warned", set())
        monkeypatch.setenv("RANK", rank)
        config = from_dict({section: {flag: True}})
        assert [getattr(config.ddp, flag), getattr(config.optimizer, flag)] == [True, True]
        resolve_small(config)
        is_said = warned and section == "optimizer"  # the key of `ddp` alone decides
        assert caplog.text.count(f"ddp.{flag}=false, optimizer.{flag}=true differ, so both are true") == is_said


def test_muons_keys_act_with_muon_alone() -> None:
    muon = {"muon_use_nesterov": False, "muon_scale_mode": "shape_scaling", "muon_extra_scale_factor": 1.0}
    with_muon = from_dict({"optimizer": {**muon, "optimizer": "dist_muon"}}).optimizer
    assert (with_muon.optimizer, with_muon.muon_nesterov, with_muon.muon_adjust_lr_fn) == ("muon", False, "original")
    assert from_dict({"optimizer": muon}).optimizer == OptimizerConfig()
    with pytest.raises(ConfigError, match=r"muon_scale_mode=spectral with muon_extra_scale_factor=1.0 is not how"):
        from_dict({"optimizer": {"muon_scale_mode": "spectral", "optimizer": "muon"}})


def test_the_null_tokenizer_has_one_token_more_than_its_vocabulary() -> None:
    config = from_dict({"tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 32_000}})
    assert (config.tokenizer.tokenizer_type, config.tokenizer.vocab_size) == ("bytes", None)
    assert config.model.vocab_size == 32_001


@pytest.mark.parametrize("name", LATER_PARTS)
def test_a_parallel_size_of_the_model_is_that_of_the_section_parallel(name: str) -> None:
    part = LATER_PARTS[name]
    for value in part.values:
        config = from_dict({"model": {name: value}})
        assert getattr(config.parallel, name) == getattr(config.model, name) == value
    config = ConfigContainer()
    assert getattr(config.model, name) == part.values[0]
    with pytest.raises(ConfigError, match=rf"^model.{name}=4 must be .*: {part.why}; .*\.$"):
        setattr(config.model, name, 4)
    other = True if part.values[0] is False else 4
    setattr(config.parallel, name, other)
    assert getattr(config.model, name) == other
    with pytest.raises(ConfigError, match=rf"^parallel.{name}={other} must be .*: {part.why}; .*\.$"):
        resolve_small(config)


def test_the_type_of_weights_is_float32_or_bfloat16() -> None:
    for value in (torch.float16, "torch.float64", "bf16", None, 3):
        with pytest.raises(ConfigError, match=r"^model.params_dtype=.* must be torch.float32 or .*fp16_mixed, whose"):
            from_dict({"model": {"params_dtype": value}})
    for value, sets in ((torch.float32, "float32"), ("float32", "float32"), (torch.bfloat16, "bfloat16")):
        config = from_dict({"model": {"params_dtype": value}})
        assert resolve_small(config).optimizer.params_dtype == sets


# Neutral values and refusals


@pytest.mark.parametrize("section", sorted({key.rpartition(".")[0] for key, rule in rules() if not rule.becomes}))
def test_a_neutral_value_changes_nothing_and_another_is_refused(section: str) -> None:
    for key, rule in rules():
        if key.rpartition(".")[0] == section and not rule.becomes:
            is_neutral(section, key.rpartition(".")[2], rule)


def is_neutral(section: str, name: str, rule: Rule) -> None:
    config = ConfigContainer()
    holder = getattr(config, section) if section else config
    assert getattr(holder, name) == rule.default
    for value in rule.accepts or (rule.default, 3, "text", None):
        setattr(holder, name, value)
        assert getattr(holder, name) == value
    assert to_flat(config) == to_flat(ConfigContainer())
    if rule.accepts is not None:
        before = getattr(holder, name)
        with pytest.raises(ConfigError, match=f"{name}='another value' must be"):
            setattr(holder, name, "another value")
        assert getattr(holder, name) == before
        assert rule.remedy
    assert rule.why


def test_onstep_config_explains_keys_of_bridge() -> None:
    context = explain("model.context_parallel_size")
    assert "sets parallel.context_parallel_size and must be 1: context parallelism" in " ".join(context.split())
    assert "sets validation.eval_interval and accepts any value." in explain("train.eval_interval")


def test_true_is_not_one() -> None:
    with pytest.raises(ConfigError, match="context_parallel_size=True must be 1"):
        ConfigContainer().model.context_parallel_size = True  # type: ignore[attr-defined]


def test_constructors_accept_bridges_keys_and_name_unknown_ones() -> None:
    dataset = GPTDatasetConfig(seq_length=64, blend=None, dataloader_type="single", data_sharding=True)  # type: ignore[call-arg]
    assert dataset.seq_length == 64
    assert ConfigContainer(train=TrainingConfig(eval_iters=4), comm_overlap=None).validation.eval_iters == 4  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"TrainingConfig has no field 'train_itres'. Did you mean 'train_iters'\?"):
        TrainingConfig(train_itres=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Did you mean 'seq_length'"):
        ModelConfig(sequence_lenght=1)  # type: ignore[call-arg]


def test_types_of_torch_are_compared_by_name() -> None:
    config = ConfigContainer()
    config.optimizer.main_grads_dtype = torch.float32  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"optimizer.main_grads_dtype='torch.bfloat16' must be torch.float32: grad"):
        config.optimizer.main_grads_dtype = torch.bfloat16  # type: ignore[attr-defined]
    config.optimizer.exp_avg_dtype = torch.bfloat16  # type: ignore[assignment]
    assert config.optimizer.exp_avg_dtype == "bfloat16"


def test_functions_are_activations_by_their_names() -> None:
    config = ConfigContainer()
    config.model.activation_func = torch.nn.functional.gelu  # type: ignore[assignment]
    assert config.model.activation_func == "gelu"
    with pytest.raises(ConfigError, match=r"model.activation_func=tanh is not supported; set silu"):
        config.model.activation_func = torch.tanh  # type: ignore[assignment]


# Precision


def test_an_object_for_the_precision_may_be_changed_after_it_was_set() -> None:
    config = ConfigContainer()
    config.mixed_precision = precision = bf16_mixed()  # type: ignore[assignment]
    precision.grad_reduce_in_fp32, precision.loss_scale = False, 4.0
    assert config.to_dict()["mixed_precision"] == "bf16_mixed"
    resolved = resolve_small(config)
    assert (resolved.mixed_precision, resolved.optimizer.loss_scale) == ("bf16_mixed", 4.0)
    precision.fp8 = "hybrid"
    with pytest.raises(ConfigError, match="8-bit and 4-bit floating point are not supported; set mixed_precision="):
        validate(config)


def test_precisions_by_name_and_in_yaml() -> None:
    assert get_mixed_precision_config("bf16-mixed") == bf16_mixed()
    assert get_mixed_precision_config("fp16_mixed").name == fp16_mixed().name == "fp16_mixed"
    assert MixedPrecisionConfig().name is None
    of_yaml = {"_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig", "bf16": True}
    assert from_dict({"mixed_precision": of_yaml}).mixed_precision == "bf16_mixed"
    for name in ("bf16_with_fp8_delayed_scaling_mixed", "bf16-with-mxfp8-mixed"):
        with pytest.raises(ConfigError, match="8-bit and 4-bit"):
            from_dict({"mixed_precision": name})


def test_overlap_of_communication_is_accepted() -> None:
    config = ConfigContainer()
    config.comm_overlap = overlap = CommOverlapConfig(tp_comm_overlap=False)  # type: ignore[attr-defined]
    overlap.delay_wgrad_compute = False
    assert config.comm_overlap is overlap  # type: ignore[attr-defined]


# YAML


def test_from_yaml_reads_what_bridge_and_what_onstep_wrote(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "bridge.yaml", tmp_path / "onstep.yaml"
    theirs.write_text(yaml.safe_dump(of_recipe("llama32_1b")), encoding="utf-8")
    config = ConfigContainer.from_yaml(theirs)
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling["factor"] == 32.0
    assert config.train.exit_signal == 15
    config.to_yaml(ours)
    assert ConfigContainer.from_yaml(str(ours)) == config
    assert resolve(ConfigContainer.from_yaml(ours)) == resolve(config)


def test_to_yaml_without_a_path_prints(capsys: pytest.CaptureFixture[str]) -> None:
    ConfigContainer().print_yaml()
    assert from_dict(yaml.safe_load(capsys.readouterr().out)) == ConfigContainer()


@pytest.mark.parametrize(
    ("section", "target", "remedy"),
    [
        ("dataset", "megatron.bridge.data.hf.HFDatasetConfig", "set dataset.kind=chat"),
        ("model", "megatron.bridge.models.mamba.MambaModelProvider", "choose a model of the Llama"),
        ("peft", "megatron.bridge.peft.dora.DoRA", "set peft.peft_scheme=lora"),
    ],
)
def test_a_class_of_bridge_without_counterpart_is_refused(section: str, target: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section} is a {target.rpartition('.')[2]} of Megatron.*{remedy}"):
        from_dict({section: {"_target_": target}})


def test_lora_of_bridges_yaml() -> None:
    lora = {
        "_target_": "megatron.bridge.peft.lora.LoRA",
        "target_modules": ["linear_qkv", "linear_fc2"],
        "dim": 8,
        "alpha": 16,
        "dropout_position": "pre",
        "lora_dtype": None,
    }
    peft = from_dict({"peft": lora}).peft
    assert (peft.peft_scheme, peft.dim, peft.alpha) == ("lora", 8, 16.0)
    assert peft.target_modules == ["query", "key", "value", "down"]


def test_tokenizers_of_megatrons_files_are_refused_by_what_they_are() -> None:
    with pytest.raises(ConfigError, match=r"Megatron's tokenizers of this kind are not supported; convert it to a tok"):
        from_dict({"tokenizer": {"tokenizer_type": "SentencePieceTokenizer"}})


@pytest.mark.parametrize("key", ["optimizer.use_distributed_optimizer", "optimizer.overlap_param_gather"])
@pytest.mark.parametrize("value", ["2", "on_gpu"])
def test_a_shared_flag_is_true_or_false(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}='?{value}'? must be true or false"):
        apply_overrides(ConfigContainer(), [f"{key}={value}"])
