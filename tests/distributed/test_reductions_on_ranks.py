"""Reductions over real gloo ranks, and norms of models that several ranks hold, against float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked_processes import Processes, output_of

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.reduction_jobs"


@pytest.fixture(scope="module", autouse=True)
def imported(processes: Processes) -> None:
    processes.load("torch.distributed.fsdp", "torch.distributed.tensor")


def results(processes: Processes, directory: Path, job: str, ranks: int = 2, **settings: Any) -> list[dict[str, Any]]:
    codes = processes.run(JOBS, job, directory, settings, ranks=ranks)
    assert codes == [0] * ranks, output_of(directory)
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    "backend",
    ["gloo", pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))],
)
def test_the_largest_statistic_tells_none_negative_whole_and_float_apart(
    processes: Processes, tmp_path: Path, backend: str
) -> None:
    one, other = results(processes, tmp_path, "reductions", backend=backend)
    assert one["stats"] == other["stats"]
    assert [tuple(pair) for pair in one["stats"]] == [
        ("NoneType", "None"),
        ("float", "-3.5"),
        ("float", "-1.0"),
        ("int", "-2"),
        ("int", "16777217"),
        ("int", "4611686018427387905"),
        ("float", "3.0"),
        ("float", "2.5"),
        ("float", "-inf"),
        ("float", "inf"),
        ("float", "nan"),
        ("float", "-1e-300"),
        ("float", "0.5"),
        ("int", "9"),
        ("float", "1.5"),
        ("float", "0.0"),
        ("int", "1"),
    ]
    assert one["answers"] == other["answers"] == [True, False, True, False, False, True]
    assert one["alone"] == other["alone"] == -5
    assert one["memory"] == other["memory"] == [["int", 4], ["float", 0.5]]


def test_each_dimension_of_a_mesh_reduces_where_some_ranks_have_nothing(processes: Processes, tmp_path: Path) -> None:
    found = processes.results(JOBS, "reductions_on_a_mesh", tmp_path, ranks=4)
    big = 2**53 + 1
    assert [one["largest"] for one in found] == [
        [None, big, big, None, None],
        [big, big, big, big, big],
        [None, -7, big, big, None],
        [big, -7, big, -7, -7],
    ]
    assert [one["none"] for one in found] == [None] * 4
    assert [one["and"] for one in found] == [
        [True, True, False, True, True],
        [False, True, False, True, True],
        [True, False, False, True, True],
        [False, False, False, False, False],
    ]
    stages, pair, alone = ([one["memory"][place]["bytes"] for one in found] for place in range(3))
    assert (stages, pair, alone) == ([12, 13, 12, 13], [10, 12, 12, 13], [10, 11, 12, 13])
    assert found[1]["memory"][0] == {"bytes": 13, "share": 1.5}


def test_ranks_of_one_model_see_one_update(processes: Processes, tmp_path: Path) -> None:
    one, other = (result["found"] for result in results(processes, tmp_path, "agreed_updates"))
    assert one[:3] == other[:3] == [[0, 3.0, 2**24 + 1], [1, 1.0, None], [1, None, None]]
    assert one[3:] == [[0, 2.0, 2**24 + 1], [0, 1.0, None], [1, None, None]], "each rank by itself"
    assert other[3:] == [[0, 3.0, 2**24 + 1], [1, None, None], [1, None, None]]


def test_each_parameter_of_a_model_over_tensor_and_data_ranks_counts_once(processes: Processes, tmp_path: Path) -> None:
    for result in results(processes, tmp_path, "model_parallel_norm", ranks=4):
        assert result["main"] == pytest.approx(result["exact_main"], rel=1e-12)
        assert result["copied"] == pytest.approx(result["exact_copied"], rel=1e-12)
        assert result["float32"] == result["copied"], "without bf16 the parameters themselves are measured"
        assert result["own_groups"] == pytest.approx(result["exact_main"], rel=1e-12)
        assert result["stages"] == pytest.approx(result["exact_stages"], rel=1e-12)
        assert abs(result["exact_main"] - result["exact_copied"]) > 1e-6, "else the two could not be told apart"


def test_norms_of_sharded_models_and_tensors_are_those_of_the_whole(processes: Processes, tmp_path: Path) -> None:
    for result in results(processes, tmp_path, "sharded_norm"):
        assert result["model"] == pytest.approx(result["exact"], rel=1e-12)
        assert result["fully"] == pytest.approx(result["exact"], rel=1e-12)
        assert result["by_names"] == pytest.approx(result["model"], rel=1e-14)
        assert result["dtensors"] == pytest.approx(result["exact_dtensors"], rel=1e-12)
        assert "must be sharded or replicated" in result["partial"]
        assert "must be a DTensor, got Parameter" in result["plain"]


def test_zeros_of_sharded_gradients_count_once_and_muon_updates_shards(processes: Processes, tmp_path: Path) -> None:
    for result in results(processes, tmp_path, "zeros_and_muon"):
        assert result["zeros"][4:] == 2 * result["expected"][:1]
        assert result["zeros"][::2] == result["zeros"][1::2]
        assert result["expected"][0] > 0
        assert result["gap"] < 0.03 * result["moved"], "Muon iterates in bfloat16, where the order of sums shows"
