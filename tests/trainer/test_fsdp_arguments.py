"""A script for Hugging Face's Trainer with `fsdp`: losses as without, and weights that transformers loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes

JOBS = "tests.support.jobs.fsdp_jobs"
WITH_SHARDS = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Ranks that do not import transformers again."""
    server = Processes(JOBS, "transformers.models.llama.modeling_llama", "accelerate.utils", "torch.distributed.fsdp")
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first: dict[str, Any] = processes.results(JOBS, "train", tmp_path_factory.mktemp("ddp"), {"arguments": {}})[0]
    assert (first["is_fsdp_enabled"], first["is_sharded"], first["mesh"]) == (False, False, None)
    return first


def test_shards_train_as_whole_models_and_their_checkpoints_load(
    processes: Processes, tmp_path: Path, whole: dict[str, Any]
) -> None:
    settings = {"arguments": WITH_SHARDS, "loads": ["run/checkpoint-4", "run"]}
    main, other = processes.results(JOBS, "train", tmp_path, settings)
    assert main["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    for one in (main, other):
        assert one["is_fsdp_enabled"]
        assert one["is_sharded"]
        assert (one["mesh"], one["kind"], one["sizes"], one["frees"]) == ([1, 2], "FSDP", None, True)
    assert main["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    assert main["loaded"] == pytest.approx([main["norm"]] * 4, rel=1e-6)
    assert other["num_weights"] == 0

    resumed = {"arguments": {**WITH_SHARDS, "max_steps": 4}, "name": "again", "resume": "run/checkpoint-2"}
    again = processes.results(JOBS, "train", tmp_path, resumed)[0]
    assert again["losses"] == main["losses"]
    assert again["norm"] == main["norm"]


def test_options_of_fsdp_and_sizes_take_effect_and_weights_come_from_the_first_rank(
    processes: Processes, tmp_path: Path, whole: dict[str, Any]
) -> None:
    config = {"activation_checkpointing": True, "state_dict_type": "SHARDED_STATE_DICT"}
    arguments = {"fsdp": "shard_grad_op", "fsdp_config": config, "parallelism_config": {"dp_shard_size": 2}}
    main = processes.results(JOBS, "train", tmp_path, {"arguments": arguments, "lacks": True})[0]
    assert main["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert (main["sizes"], main["frees"], main["is_checkpointed"]) == (2, False, True)
    assert not (tmp_path / "run" / "checkpoint-4" / "model.safetensors").exists()


@pytest.mark.parametrize("arguments", [{}, pytest.param(WITH_SHARDS, marks=pytest.mark.slow)])
def test_a_save_of_rank_0_that_waits_for_the_others_ends_the_run(
    processes: Processes, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    main, other = processes.results(JOBS, "waiting", tmp_path, {"arguments": arguments})
    assert main == other
    assert "MainOnlyError: Waiting._save called torch.distributed.barrier() at " in main["error"]
    assert "override _save_checkpoint" in main["error"]
