"""The sizes of a run's axes: what -1 stands for, the arithmetic in errors, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from onstep.config import ConfigContainer, ParallelConfig, decide, from_dict, resolve, validate
from onstep.config.checks import parallel
from onstep.config.differences import changes
from onstep.config.parallel_sizes import ParallelSizes
from onstep.errors import ConfigError

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
            r"^parallel: 3 \(shard\) x 2 \(tensor\) = 6 does not divide the 4 ranks of this ",
        ),
        ({SHARD: 3}, 1, r"^parallel: 3 \(shard\) does not divide the 1 rank of this run; start a multiple of 3 ranks"),
        (
            {REPLICATE: 2},
            4,
            r"^parallel: 2 \(replicate\) must be the number of ranks, but this run has 4 ranks; ",
        ),
        ({REPLICATE: 1}, 2, r"^parallel: 1 must be .* set parallel.data_parallel_replicate_size=-1"),
        ({REPLICATE: 2, SHARD: 3}, 8, r"^parallel: 2 \(replicate\) x 3 \(shard\) = 6 must be the number of ranks"),
        ({EXPERT: 3}, 4, r"4 \(replicate\) x 1 .* = 4 must be a multiple of 3 \(expert\)"),
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
            {TENSOR: 2},
            4,
            "tensor_model_parallel_size=2 must be 1: tensor parallelism is not supported; ",
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
        ("optimizer", {"optimizer": "adamw_8bit"}, "=adamw_8bit is one of bitsandbytes, .* between 4 ranks; use adam,"),
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
    assert resolve(config_with("ddp", num_distributed_optimizer_instances=2), 2).parallel_sizes(2).dp_replicate == 2


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


def test_a_distributed_optimizer_over_several_ranks_is_said_to_divide_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, ranks, is_said in (("0", 1, False), ("1", 2, False), ("0", 2, True)):
        monkeypatch.setattr(parallel, "_told", set())
        monkeypatch.setenv("RANK", rank)
        validate(config_with("ddp", use_distributed_optimizer=True), ranks)
        assert ("does not divide the state of the optimizer between the ranks" in caplog.text) is is_said
