"""The sizes of a run's axes: what -1 stands for, the arithmetic in errors, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from onstep.config import ConfigContainer, ParallelConfig, apply_overrides, decide, from_dict, resolve, validate
from onstep.config.checks import parallel
from onstep.config.differences import changes
from onstep.config.parallel_sizes import ParallelSizes, places
from onstep.errors import ConfigError
from onstep.training.mixed_precision import MixedPrecisionConfig

REPLICATE, SHARD = "data_parallel_replicate_size", "data_parallel_shard_size"
TENSOR, PIPELINE, EXPERT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"


def config_with(section: str = "parallel", **values: Any) -> ConfigContainer:
    run = {"train": {"train_iters": 10, "micro_batch_size": 2}, "optimizer": {"lr": 1e-3}}
    return from_dict(run | {section: values})


@pytest.mark.parametrize(
    ("values", "ranks", "sizes"),
    [
        ({}, 1, ParallelSizes()),
        ({}, 4, ParallelSizes(dp_replicate=4)),
        ({REPLICATE: 2}, 2, ParallelSizes(dp_replicate=2)),
        ({SHARD: 2}, 8, ParallelSizes(dp_replicate=4, dp_shard=2)),
        ({SHARD: -1}, 4, ParallelSizes(dp_shard=4)),
        ({REPLICATE: 2, SHARD: -1}, 8, ParallelSizes(dp_replicate=2, dp_shard=4)),
        ({SHARD: -1, REPLICATE: 1, TENSOR: 2, PIPELINE: 2}, 8, ParallelSizes(pp=2, dp_shard=2, tp=2)),
        ({"context_parallel_size": 2, EXPERT: 4}, 4, ParallelSizes(dp_replicate=2, cp=2, ep=4)),
    ],
)
def test_the_rest_of_the_ranks_is_one_of_the_sizes(values: dict[str, Any], ranks: int, sizes: ParallelSizes) -> None:
    assert ParallelConfig(**values).sizes(ranks) == sizes


@pytest.mark.parametrize(
    ("values", "ranks", "said"),
    [
        (
            {TENSOR: 2, SHARD: 3},
            4,
            r"^\S+_shard_size=3 \* parallel\.tensor_model_parallel_size=2 = 6 does not divide the 4 ranks of this ",
        ),
        (
            {SHARD: 3},
            1,
            r"^parallel\.\S+_shard_size=3 does not divide the 1 rank of this run; start a multiple of 3 ranks",
        ),
        (
            {REPLICATE: 2},
            4,
            r"^parallel\.data_parallel_replicate_size=2 must be the number of ranks, but this run has 4 ranks; ",
        ),
        (
            {REPLICATE: 1},
            2,
            r"^\S+_replicate_size=1 \* \S+_shard_size=1 = 1 must be .* parallel.data_parallel_replicate_size=-1",
        ),
        ({REPLICATE: 2, SHARD: 3}, 8, r"^\S+_replicate_size=2 \* \S+_shard_size=3 = 6 must be the number of ranks"),
        ({EXPERT: 3}, 4, r"_size=4 \* .*shard_size=1 \* .* = 4 must be a multiple of \S+expert_model_parallel_size=3:"),
    ],
)
def test_sizes_that_are_not_the_ranks_are_refused_with_the_arithmetic(
    values: dict[str, Any], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        ParallelConfig(**values).sizes(ranks)


@pytest.mark.parametrize(
    ("section", "values", "ranks", "said"),
    [
        (
            "parallel",
            {"context_parallel_size": 2},
            4,
            "context_parallel_size=2 must be 1: context parallelism is not supported; ",
        ),
        (
            "dist",
            {"use_megatron_fsdp": True},
            1,
            "use_megatron_fsdp=True must be false: .*; set dist.use_torch_fsdp2=true",
        ),
        (
            "ddp",
            {"use_megatron_fsdp": True},
            1,
            "use_megatron_fsdp=True must be false: .*; set dist.use_torch_fsdp2=true",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name_with_what_works(
    section: str, values: dict[str, Any], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(config_with(section, **values), ranks)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("fsdp", {"reshard_after_forward": 4}, "reshard_after_forward=4 must divide the 4 ranks of .*, and be less"),
        ("fsdp", {"reshard_after_forward": 3}, "reshard_after_forward=3 must divide the 4 ranks of"),
        ("fsdp", {"reshard_after_forward": 1}, "fsdp.reshard_after_forward=1 must be true, false, or a number of"),
        ("optimizer", {"optimizer": "adamw_8bit"}, "=adamw_8bit has quantized state, .* between 4 ranks; use adam,"),
        ("peft", {"peft_scheme": "lora", "base_quantization": "nf4"}, "=nf4 holds weights that cannot be divided"),
    ],
)
def test_what_cannot_be_in_shards_is_refused(section: str, values: dict[str, Any], said: str) -> None:
    config = config_with(section, **values)
    config.parallel.data_parallel_shard_size = -1
    with pytest.raises(ConfigError, match=said):
        validate(config, 4)


def test_the_flag_of_bridge_divides_the_model_between_all_ranks() -> None:
    config = resolve(config_with("dist", use_torch_fsdp2=True), 4)
    assert config.parallel_sizes(4) == ParallelSizes(dp_shard=4)
    assert resolve(config_with("dist", use_torch_fsdp2=False), 4).parallel_sizes(4) == ParallelSizes(dp_replicate=4)


def test_replicas_are_data_parallel_ranks_and_shards_of_one_rank_are_whole() -> None:
    assert resolve(config_with(data_parallel_replicate_size=4), 4).train.global_batch_size == 8
    assert (
        resolve(config_with(data_parallel_shard_size=-1, data_parallel_replicate_size=2), 2).parallel_sizes(2).dp_shard
        == 1
    )


def test_without_ranks_a_configuration_is_one_of_the_fewest_that_its_sizes_allow() -> None:
    assert resolve(config_with(data_parallel_replicate_size=3)).train.global_batch_size == 6
    assert resolve(config_with()).train.global_batch_size == 2


def test_a_run_continues_with_other_sizes() -> None:
    before, today = (resolve(config_with(data_parallel_replicate_size=size)) for size in (2, 4))
    today.train.global_batch_size = before.train.global_batch_size
    today.validation.eval_global_batch_size = before.validation.eval_global_batch_size
    found = changes(before.to_dict(), today)
    assert [one.key for one in found] == ["parallel.data_parallel_replicate_size"]
    assert decide(found, today, "error", 4).parallel.data_parallel_replicate_size == 4


def test_a_distributed_optimizer_divides_the_ranks_into_instances() -> None:
    for instances, shape in ((1, (1, 4)), (2, (2, 2)), (4, (4, 1))):
        config = config_with("ddp", use_distributed_optimizer=True, num_distributed_optimizer_instances=instances)
        sizes = config.parallel_sizes(4)
        assert (sizes.dp_replicate, sizes.dp_shard) == shape
        assert config.parallel_sizes(1 if instances == 1 else 4).ranks == (1 if instances == 1 else 4)
    config = config_with("ddp", use_distributed_optimizer=True, num_distributed_optimizer_instances=3)
    with pytest.raises(ConfigError, match=r"num_distributed_optimizer_instances=3 must divide the 4 ranks .* 1, 2, 4"):
        config.parallel_sizes(4)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("parallel", "data_parallel_shard_size", -1, "data_parallel_shard_size=-1 the model itself"),
        ("ddp", "sync_each_micro_batch", True, "sync_each_micro_batch=true has no effect"),
        ("ddp", "broadcast_buffers", True, "broadcast_buffers=true has no effect"),
        ("optimizer", "optimizer", "adamw_bnb_8bit", "has quantized state"),
    ],
)
def test_what_a_distributed_optimizer_cannot_do_is_refused_on_several_ranks(
    section: str, key: str, value: object, said: str
) -> None:
    config = config_with("ddp", use_distributed_optimizer=True)
    setattr(getattr(config, section), key, value)
    with pytest.raises(ConfigError, match=said):
        parallel.check_parallel(config, 2)
    parallel.check_parallel(config, 1)


def test_gathers_in_compiled_code_are_refused() -> None:
    config = config_with("ddp", use_distributed_optimizer=True, overlap_param_gather=True)
    config.train.torch_compile = True
    with pytest.raises(ConfigError, match=r"torch.compile has made of a whole model leaves out"):
        parallel.check_parallel(config, 2)


def test_several_ranks_are_named_in_one_phrase() -> None:
    assert places([1], ParallelSizes(dp_replicate=4).place) == "rank 1"
    assert places([1, 3], ParallelSizes(dp_replicate=4).place) == "ranks 1, 3"
    named = "rank 1, dp_shard 1, dp_replicate 0; rank 2, dp_shard 0, dp_replicate 1"
    assert places([1, 2], ParallelSizes(dp_replicate=2, dp_shard=2).place) == named


_AWARE = ["optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bfloat16"]
_IN_MXFP8 = ["ddp.use_distributed_optimizer=true", "ddp.fp8_param_gather=true"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["ddp.fp8_param_gather=true"], "ddp.fp8_param_gather=True has no effect with ddp.use_distributed_optimizer"),
        (["ddp.reuse_grad_buf_for_mxfp8_param_ag=true"], "has no effect with ddp.fp8_param_gather=False; set ddp.fp8"),
        (
            [*_IN_MXFP8, "optimizer.params_dtype=bfloat16"],
            "float32 masters of float32 weights, but optimizer.params_dtype=bfloat16; leave it float32",
        ),
        (_AWARE[1:], "optimizer.exp_avg_dtype='bfloat16' has no effect with optimizer.use_precision_aware_optimizer"),
        (
            ["optimizer.exp_avg_sq_dtype=float16", _AWARE[0]],
            "optimizer.exp_avg_sq_dtype='float16' must be float32 | bfloat16",
        ),
        ([*_AWARE, "optimizer.optimizer=muon"], "an average of AdamW, but optimizer.optimizer=muon; use adam"),
        ([*_AWARE, "optimizer.optimizer=sgd"], "an average of AdamW, but optimizer.optimizer=sgd; use adam"),
        (
            [*_AWARE, "optimizer.params_dtype=bfloat16", "optimizer.main_params_dtype=bfloat16"],
            "has no effect with optimizer.main_params_dtype=bfloat16, whose state is in bfloat16 in any case",
        ),
        (["optimizer.main_grads_dtype=torch.bfloat16"], "optimizer.main_grads_dtype='torch.bfloat16' must be torch.fl"),
        (["optimizer.main_params_dtype=bfloat16"], "main_params_dtype='bfloat16' has no effect with optimizer.params_"),
    ],
)
def test_types_that_cannot_act_are_refused_in_one_line_before_ranks_meet(overrides: list[str], said: str) -> None:
    config = config_with("optimizer", lr=1e-3)
    with pytest.raises(ConfigError) as refused:  # noqa: PT012 - an override may be refused by itself
        apply_overrides(config, overrides)
        parallel.check_parallel(validate(config), 2)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_objects_for_the_precision_enable_gathers_in_mxfp8() -> None:
    config = config_with("ddp", use_distributed_optimizer=True)
    config.mixed_precision = MixedPrecisionConfig(bf16=True, fp8_param_gather=True)  # type: ignore[assignment]
    config.optimizer.reuse_grad_buf_for_mxfp8_param_ag = True  # type: ignore[attr-defined]
    config = resolve(config)
    assert config.ddp.fp8_param_gather
    assert config.ddp.reuse_grad_buf_for_mxfp8_param_ag
    assert config.mixed_precision == "bf16_mixed"


SMALL = {"num_attention_heads": 4, "hidden_size": 32, "vocab_size": 67, "seq_length": 32}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, None),
        ({"parallel": {"sequence_parallel": True}}, None),
        (
            {"parallel": {TENSOR: 1, "sequence_parallel": True}},
            r"^parallel.sequence_parallel=true .*_size=1; set it to f",
        ),
        (
            {"model": {"num_attention_heads": 5}},
            r"num_attention_heads=5 must be a multiple of \S+=2, .* nearest .* is 1",
        ),
        ({"model": {"num_query_groups": 1}}, None),
        (
            {"parallel": {TENSOR: 4}, "model": {"num_attention_heads": 12, "num_query_groups": 6, "kv_channels": 4}},
            r"num_query_groups=6 must be a multiple of \S+=4, or a divisor of it, .* nearest .* is 3\.$",
        ),
        ({"model": {"ffn_hidden_size": 33}}, "ffn_hidden_size=33 must be a multiple of"),
        (
            {"parallel": {TENSOR: 4}, "model": {"vocab_size": 5}},
            r"vocab_size=5 leaves a rank of \S+=4 without a token; the nearest size that does not is 3",
        ),
        (
            {"parallel": {"sequence_parallel": True}, "dataset": {"seq_length": 33}},
            "seq_length=33 must be .*; use 32, or",
        ),
        ({"model": {"num_moe_experts": 4, "mtp_num_layers": 1}}, None),
        (
            {"model": {"num_moe_experts": 4}, "parallel": {"expert_tensor_parallel_size": 1}},
            "expert_tensor_parallel_size=1 cannot be combined with .*: experts are divided as ",
        ),
        (
            {"model": {"num_moe_experts": 4, "moe_ffn_hidden_size": 33}},
            "moe_ffn_hidden_size=33 must be a multiple of .* nearest .* is 1",
        ),
        ({"ddp": {"use_distributed_optimizer": True, "overlap_param_gather": True}}, None),
        (
            {"ddp": {"use_distributed_optimizer": True, "fp8_param_gather": True}},
            "fp8_param_gather=true cannot be combined with .*: it quantizes whole parameters; set it to false, or",
        ),
        ({"train": {"torch_compile": True}}, None),
        ({"optimizer": {"optimizer": "muon"}}, None),
    ],
)
def test_what_tensor_parallel_ranks_cannot_divide_is_refused_by_name(values: dict[str, Any], said: str | None) -> None:
    run: dict[str, Any] = {"train": {"train_iters": 10, "micro_batch_size": 2}, "optimizer": {"lr": 1e-3}}
    run |= {"model": SMALL, "parallel": {TENSOR: 2}, "dataset": {"seq_length": 32}}
    config = from_dict({name: {**run.get(name, {}), **values.get(name, {})} for name in {*run, *values}})
    if said is None:
        validate(config, 4)
        return
    with pytest.raises(ConfigError, match=said) as refused:
        validate(config, 4)
    assert "\n" not in str(refused.value)


def test_a_distributed_optimizer_of_one_rank_of_data_divides_nothing() -> None:
    run = {"train": {"train_iters": 10, "micro_batch_size": 2}, "optimizer": {"lr": 1e-3}, "model": SMALL}
    run |= {"dataset": {"seq_length": 32}}
    config = from_dict(run | {"parallel": {TENSOR: 2}, "ddp": {"use_distributed_optimizer": True}})
    assert resolve(config, 2).parallel_sizes(2) == ParallelSizes(tp=2)
    assert resolve(config, 4).parallel_sizes(4) == ParallelSizes(dp_shard=2, tp=2)
