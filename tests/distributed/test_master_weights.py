"""bfloat16 weights with float32 masters, whole on every rank and divided between ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.layout_jobs"
BFLOAT16 = ("optimizer.params_dtype=bfloat16", "ddp.grad_reduce_in_fp32=true")


@pytest.mark.parametrize("optimizer", ["adam", "muon", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mesh", [[2], pytest.param([2, 2], marks=pytest.mark.slow)], ids=["shards", "replicas of shards"]
)
def test_divided_weights_and_their_masters_are_updated_as_whole_ones(
    processes: Processes, tmp_path: Path, mesh: list[int], optimizer: str
) -> None:
    """But for the last bit: a kernel computes the end of a tensor with other instructions than the rest of it."""
    settings = {"mesh": mesh, "optimizer": optimizer}
    distances = processes.results(JOBS, "master_weights", tmp_path, settings, ranks=2 ** len(mesh))
    assert max(distances) < (1e-5 if optimizer == "muon" else 2e-6)


def trained(processes: Processes, directory: Path, layout: str, ranks: int, keys: tuple[str, ...]) -> Any:
    directory.mkdir()
    settings = {"layout": layout, "variants": [("pretrain", {"keys": keys})], "steps": 4}
    [[row], *_] = processes.results(JOBS, "rows", directory, settings, ranks=ranks)
    return row, torch.load(directory / "0.pt")


@pytest.mark.parametrize("layout", ["distopt2 both", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_muon_updates_whole_matrices_of_bfloat16_weights(processes: Processes, tmp_path: Path, layout: str) -> None:
    keys = (*BFLOAT16, "optimizer.optimizer=muon", "optimizer.muon_fp32_matmul_prec=highest")
    one, _ = trained(processes, tmp_path / "one", "one", 1, keys)
    row, own = trained(processes, tmp_path / "row", layout, 2, keys)
    assert {tensor.dtype for tensor in own.values()} == {torch.bfloat16}
    assert row["losses"] == pytest.approx(one["losses"], rel=2e-2)
    assert row["held"]["state"] == pytest.approx(one["held"]["state"] / 2, rel=0.01)


@pytest.mark.slow
def test_a_run_with_master_weights_is_that_of_one_process_in_every_layout(processes: Processes, tmp_path: Path) -> None:
    """Losses differ by the rounding of gradients to bfloat16; what is held, by nothing."""
    exact, _ = trained(processes, tmp_path / "exact", "one", 1, ())
    one, weights = trained(processes, tmp_path / "one", "one", 1, BFLOAT16)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for layout in ("ddp2", "distopt2", "fsdp2"):
        row, own = trained(processes, tmp_path / layout, layout, 2, BFLOAT16)
        assert row["losses"] == pytest.approx(one["losses"], rel=2e-2)
        assert row["losses"] == pytest.approx(exact["losses"], rel=2e-2)
        assert {tensor.dtype for tensor in own.values()} == {torch.bfloat16}
        state = one["held"]["state"] / (1 if layout == "ddp2" else 2)
        assert row["held"]["state"] == pytest.approx(state, rel=0.01)
    assert row["held"]["state"] == 5 * row["held"]["parameters"], "10 bytes for each 2: two averages, a remainder"


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("distopt", marks=pytest.mark.slow)])
def test_masters_are_saved_and_continue_on_their_layout_to_the_bit_and_on_one_process(
    processes: Processes, tmp_path: Path, layout: str
) -> None:
    def runs(directory: Path, how: str, ranks: int, seed: int) -> Any:
        settings = {"how": how, "steps": 6, "bfloat16": True, "seed": seed}
        [found, *_] = processes.results("tests.support.jobs.shard_run_jobs", "run", directory, settings, ranks=ranks)
        return found

    whole = runs(tmp_path / "whole", layout, 2, seed=0)
    for how, ranks in ((layout, 2), ("bare", 1)):
        directory = tmp_path / how
        shutil.copytree(tmp_path / "whole" / "checkpoints" / "checkpoint-2", directory / "checkpoints" / "checkpoint-2")
        found = runs(directory, how, ranks, seed=1)
        assert found["losses"] == pytest.approx(whole["losses"][2:], rel=2e-2)
        if how == layout:
            assert (found["losses"], found["digests"]) == (whole["losses"][2:], whole["digests"])


MOMENTS = (
    "optimizer.use_precision_aware_optimizer=true",
    "optimizer.exp_avg_dtype=bfloat16",
    "optimizer.exp_avg_sq_dtype=bfloat16",
)


def test_moments_in_bfloat16_have_half_the_bytes_where_updates_are_divided(
    processes: Processes, tmp_path: Path
) -> None:
    one, _ = trained(processes, tmp_path / "one", "one", 1, MOMENTS)
    row, _ = trained(processes, tmp_path / "distopt2", "distopt2", 2, MOMENTS)
    exact, _ = trained(processes, tmp_path / "exact", "distopt2", 2, ())
    assert row["losses"] == pytest.approx(one["losses"], rel=2e-2)
    assert row["losses"] == pytest.approx(exact["losses"], rel=2e-2)
    assert row["losses"] != exact["losses"]
    assert 2 * row["held"]["state"] == exact["held"]["state"]


@pytest.mark.parametrize("layout", ["mxfp8", pytest.param("distopt", marks=pytest.mark.slow)])
def test_moments_in_bfloat16_are_saved_and_continue_to_the_bit(
    processes: Processes, tmp_path: Path, layout: str
) -> None:
    def run(directory: Path, seed: int) -> Any:
        settings = {"how": layout, "steps": 6, "low_moments": True, "seed": seed}
        [found, *_] = processes.results("tests.support.jobs.shard_run_jobs", "run", directory, settings, ranks=2)
        return found

    whole = run(tmp_path / "whole", seed=0)
    saved = tmp_path / "whole" / "checkpoints" / "checkpoint-2"
    shutil.copytree(saved, tmp_path / "again" / "checkpoints" / "checkpoint-2")
    found = run(tmp_path / "again", seed=1)
    assert (found["losses"], found["digests"]) == (whole["losses"][2:], whole["digests"])
    for part in ("model", "optimizer"):
        of_runs = [tmp_path / name / "checkpoints" / "checkpoint-6" / part for name in ("whole", "again")]
        files = sorted(one.name for one in of_runs[0].glob("*.safetensors"))
        assert files
        assert [(of_runs[0] / one).read_bytes() for one in files] == [(of_runs[1] / one).read_bytes() for one in files]
