"""The stages of a pipeline: which layers and ranks they have, which schedules run them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from onstep.config import ConfigContainer, ParallelConfig, from_dict, validate
from onstep.config.checks import idle_settings
from onstep.config.pipelines import SCHEDULES, layers_of_stages, schedule_of, stages_of_rank
from onstep.errors import ConfigError
from tests.support.schedule_orders import FORWARD, FULL, WEIGHT, most_at_once, orders_of

SIZE, VIRTUAL = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
AT_ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
NAME, LAYOUT = "pipeline_schedule", "pipeline_model_parallel_layout"


def parallel(ranks: int = 2, **values: Any) -> ParallelConfig:
    return ParallelConfig(**{SIZE: ranks} | values)


def config_with(batch: int = 8, ranks: int = 2, **values: Any) -> ConfigContainer:
    sections: dict[str, Any] = {"parallel": {SIZE: ranks}, "train": {}, "model": {"num_layers": 4}}
    for key, value in values.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    sections["train"] |= {"train_iters": 10, "micro_batch_size": 2, "global_batch_size": batch}
    sections.setdefault("optimizer", {})["lr"] = 1e-3
    return from_dict(sections)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "1F1B"),
        ({VIRTUAL: 1}, "1F1B"),
        ({VIRTUAL: 2}, "Interleaved1F1B"),
        ({NAME: "gpipe"}, "GPipe"),
        ({NAME: "ScheduleZBVZeroBubble"}, "ZBVZeroBubble"),
        ({NAME: "DualPipeV", VIRTUAL: 2}, "DualPipeV"),
    ],
)
def test_a_schedule_has_the_names_of_torch_and_a_default(values: dict[str, Any], name: str) -> None:
    assert schedule_of(parallel(**values)).name == name


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({NAME: "1F1C"}, r"^parallel.pipeline_schedule must be one of GPipe, 1F1B, .*, got '1F1C'. Did you mean"),
        ({NAME: "GPipe", VIRTUAL: 2}, r"=GPipe has one stage on each rank, but parallel\.virtual\S+=2; set it to null"),
        (
            {NAME: "LoopedBFS"},
            r"^parallel.pipeline_schedule=LoopedBFS interleaves several stages .*; set \S+=2 or more",
        ),
        ({NAME: "ZBVZeroBubble", VIRTUAL: 3}, r"=ZBVZeroBubble has two stages on each rank, but \S+=3; set it to 2"),
    ],
)
def test_a_schedule_that_does_not_run_the_stages_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        schedule_of(parallel(**values))


def test_a_schedule_that_does_not_exist_is_refused_without_a_pipeline_too() -> None:
    with pytest.raises(ConfigError, match=r"pipeline_schedule must be one of GPipe, .*, got '1F1C'"):
        validate(config_with(ranks=1, parallel__pipeline_schedule="1F1C"), 1)
    config = config_with(ranks=1, parallel__pipeline_schedule="GPipe", parallel__pipeline_model_parallel_layout=[4])
    validate(config, 1)
    pipeline = "parallel.pipeline_model_parallel_size other than 1"
    assert dict(idle_settings(config))[pipeline] == [
        "parallel.pipeline_schedule=GPipe",
        "parallel.pipeline_model_parallel_layout=[4]",
    ]


def test_stages_go_round_the_ranks_or_back_again_in_a_v() -> None:
    assert [stages_of_rank(parallel(3), rank) for rank in range(3)] == [[0], [1], [2]]
    assert [stages_of_rank(parallel(2, **{VIRTUAL: 3}), rank) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert [stages_of_rank(parallel(2, **{NAME: "DualPipeV"}), rank) for rank in range(2)] == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("values", "layers", "found"),
    [
        ({}, 4, [2, 2]),
        ({VIRTUAL: 2}, 8, [2, 2, 2, 2]),
        ({LAYOUT: [1, 4]}, 5, [1, 4]),
        ({"account_for_embedding_in_pipeline_split": True}, 7, [3, 4]),
        (AT_ENDS, 6, [3, 3]),
        (
            {SIZE: 3, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
            7,
            [2, 3, 2],
        ),
    ],
)
def test_layers_are_shared_equally_or_as_listed(values: dict[str, Any], layers: int, found: list[int]) -> None:
    stages = layers_of_stages(parallel(**values), layers)
    assert [len(one) for one in stages] == found
    assert [layer for one in stages for layer in one] == list(range(layers))


@pytest.mark.parametrize(
    ("values", "layers", "said"),
    [
        ({}, 5, r"^model.num_layers=5 cannot be divided into 2 equal stages; use 4 or 6 layers, another .*_layout\.$"),
        ({VIRTUAL: 2}, 3, r"^model.num_layers=3 cannot be divided into 4 equal stages; use 4 layers, "),
        ({"account_for_loss_in_pipeline_split": True}, 4, r"=4, the loss counted as one cannot .*; use 3 or 5 layers"),
        (
            {LAYOUT: [2, 2, 2]},
            6,
            r"_layout=\[2, 2, 2\] must have .* of each of the 2 stages, 6 in all, but has 3 of 6;",
        ),
        (
            {SIZE: 3, LAYOUT: [3, 0, 3]},
            6,
            r"=\[3, 0, 3\] must have at least one layer on each stage between the first",
        ),
        ({LAYOUT: [7, -1]}, 6, r"=\[7, -1\] must have at least one layer on each"),
        ({LAYOUT: [3, 2]}, 6, r"_layout=\[3, 2\] must have the number of layers of each of the 2 stages, 6 in all"),
    ],
)
def test_layers_that_stages_cannot_share_are_refused_with_the_nearest_that_they_can(
    values: dict[str, Any], layers: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        layers_of_stages(parallel(**values), layers)


def test_numbers_of_micro_batches_are_those_that_torch_runs() -> None:
    runs = {name: [n for n in range(1, 10) if one.runs(2, n)] for name, one in SCHEDULES.items()}
    in_rounds, all_of_them = [1, 2, 3, 4, 6, 8], list(range(1, 10))
    assert runs == {
        "GPipe": all_of_them,
        "1F1B": list(range(2, 10)),
        "Interleaved1F1B": in_rounds,
        "LoopedBFS": all_of_them,
        "InterleavedZeroBubble": in_rounds,
        "ZBVZeroBubble": all_of_them,
        "DualPipeV": list(range(4, 10)),
    }
    assert all(one.for_any_number.runs(4, 1) for one in SCHEDULES.values())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"batch": 2},
            r"^train\S+=2 gives 1 micro-batch of 2 to each of 1 pipeline, which the schedule 1F1B on 2 ranks does not "
            r"run; use train.micro_batch_size=1, train.global_batch_size=4, or parallel.pipeline_schedule=GPipe\.$",
        ),
        (
            {"batch": 10, "parallel__" + VIRTUAL: 2},
            r"=10 gives 5 micro-batches .*1F1B .*; use train.micro_batch_size=1, .*batch_size=12, or .*=LoopedBFS",
        ),
        ({"model__num_layers": 5}, r"^model.num_layers=5 cannot be divided into 2 equal stages"),
        ({"ddp__use_distributed_optimizer": True, "ddp__overlap_grad_reduce": True},
         r"^ddp.overlap_grad_reduce=true is not supported with \S+=2, schedule 1F1B; set it to false"),
        (
            {"peft__peft_scheme": "lora", "model__hf_config": {"num_hidden_layers": 4}},
            r"^peft.peft_scheme=lora is not supported with models of transformers, parallel.*; set it to null, or the",
        ),
        ({"optimizer__optimizer": "adamw_8bit"}, r"^optimizer.optimizer=adamw_8bit is not .*; set it to adam or adamw"),
        (
            {"model__recompute_granularity": "selective", "parallel__pipeline_schedule": "DualPipeV"},
            r"^model.recompute_granularity=selective is not .* DualPipeV, whose back.* halves; set it to null or full",
        ),
        (
            {"model__mtp_num_layers": 1, "parallel__pipeline_schedule": "ZBVZeroBubble"},
            r"^model.mtp_num_layers=1 is not .*ZBVZeroBubble, whose back.* halves; set it to null or 0",
        ),
        (
            {"model__mtp_num_layers": 1, "model__position_embedding_type": "learned_absolute"},
            r"^model.position_embedding_type=learned_absolute is not .* no table of positions; set it to rope, or",
        ),
        (
            {"model__moe_router_load_balancing_type": "global_aux_loss", "model__recompute_granularity": "full"},
            r"^model.moe_router_load_balancing_type=global_aux_loss counts .*set one of them to null or aux_loss",
        ),
    ],
)  # fmt: skip
def test_what_a_pipeline_does_not_support_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    config = config_with(**values)
    with pytest.raises(ConfigError, match=said):
        validate(config, 2)


TENSORS, SHARDS = {"parallel__tensor_model_parallel_size": 2}, {"parallel__data_parallel_shard_size": 2}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (SHARDS | {"ddp__sync_each_micro_batch": True}, r"^ddp.sync_each_micro_batch=true is not supported with"),
        (
            TENSORS | {"model__hf_config": {"num_hidden_layers": 4}},
            r"cannot divide the stages of a model of transformers",
        ),
        (
            SHARDS | {"parallel__pipeline_schedule": "DualPipeV", "model__share_embeddings_and_output_weights": True},
            r"^parallel.pipeline_schedule=DualPipeV has both ends of the model on one rank, whose tied embedding",
        ),
    ],
)
def test_what_divided_stages_do_not_support_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    config = config_with(batch=16, **values)
    with pytest.raises(ConfigError, match=said):
        validate(config, 4)


def test_stages_may_be_divided_further() -> None:
    for values in (TENSORS, SHARDS, TENSORS | {"parallel__sequence_parallel": True, "dataset__seq_length": 256}):
        validate(config_with(**values), 4)
    validate(config_with(**TENSORS, **SHARDS), 8)


def test_a_pipeline_is_valid_and_its_keys_are_those_of_megatron_bridges_model_too() -> None:
    validate(config_with(), 2)
    proofs = {f"checkpoint__{key}": True for key in ("certify", "validate_replication")}
    validate(config_with(**proofs, logger__log_params_norm=True, optimizer__decoupled_lr=1e-3), 2)
    validate(config_with(parallel__data_parallel_replicate_size=2), 4)
    names = (SIZE, VIRTUAL, LAYOUT, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    for name, value in zip(names, (2, 3, [1, 3], True, True), strict=True):
        config = from_dict({"model": {name: value}})
        assert getattr(config.parallel, name) == getattr(config.model, name) == value


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_as_many_passes_have_activations_at_once_as_the_orders_of_torch_let(name: str) -> None:
    changes = {FORWARD: 1, FULL: -1, WEIGHT: -1}
    schedule = SCHEDULES[name]
    for ranks in (2, 3, 4):
        for micro_batches in (2 * ranks, 4 * ranks, 2 * ranks + 2):
            if not schedule.runs(ranks, micro_batches):
                continue
            virtual = {VIRTUAL: 2} if schedule.chunks != "one" else {}
            own = stages_of_rank(parallel(ranks, **{NAME: name, **virtual}), 0)
            for rank, order in orders_of(name, ranks, micro_batches, own).items():
                expected = schedule.most_held(ranks, rank, micro_batches, len(own))
                found = most_at_once(order, lambda kind, stage: changes.get(kind, 0))
                assert found == expected, (ranks, micro_batches, rank)
