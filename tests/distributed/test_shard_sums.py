"""Norms, clipping, zeros and gates of sharded gradients over real gloo ranks, beside one process in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_steps import HOST_READS
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.shard_sum_jobs"


@pytest.fixture(scope="module", autouse=True)
def imported(processes: Processes) -> None:
    processes.load("torch.distributed.fsdp", "torch.distributed.tensor.parallel", JOBS)


@pytest.mark.parametrize(
    ("how", "ranks", "calls"),
    [
        pytest.param("fsdp", 2, 1, marks=pytest.mark.slow),
        ("fsdp", 3, 1),
        pytest.param("fsdp", 4, 1, marks=pytest.mark.slow),
        ("hsdp", 4, 2),
        ("tp", 2, 1),
        ("tp sequence", 2, 1),
        ("fsdpxtp", 4, 2),
        pytest.param("fsdpxtp sequence", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_norm_clipping_and_zeros_of_each_layout_are_those_of_one_process(
    processes: Processes, tmp_path: Path, how: str, ranks: int, calls: int
) -> None:
    results = processes.results(JOBS, "norm", tmp_path, {"how": how}, ranks=ranks)
    assert len({one["bits"] for one in results}) == 1
    for one in results:
        assert one["norm"] == pytest.approx(one["exact"], rel=1e-6)
        assert one["gap"] < 1e-6, "the clipped gradients, whose norm is 1"
        assert one["calls"] == 2 * calls, "one collective of each mesh dimension for the norm, one for the zeros"
        assert one["zeros"][0] == one["zeros"][1] > 0
        assert one["by_name"] == pytest.approx(1.0, rel=1e-5)
        assert one["params"] == pytest.approx(len(one["params"]) * [one["exact_params"]], rel=1e-6)
        assert one["moved"][0] > 1e-3, "each parameter is updated"
    assert results[0]["kinds"] == (["DTensor", "Parameter"] if how == "tp" else ["DTensor"])


@pytest.mark.parametrize(("how", "ranks", "most"), [("fsdp", 2, 2), pytest.param("hsdp", 4, 3, marks=pytest.mark.slow)])
def test_loss_and_norm_of_a_step_take_at_most_three_collectives(
    processes: Processes, tmp_path: Path, how: str, ranks: int, most: int
) -> None:
    for found in processes.results(JOBS, "collectives", tmp_path, {"how": how}, ranks=ranks):
        assert found["of_steps"][1:] == [most] * 5


def test_on_an_accelerator_a_mix_is_updated_by_fused_kernels_and_nothing_is_read(
    processes: Processes, tmp_path: Path
) -> None:
    for found in processes.results(JOBS, "quiet_norm", tmp_path, {"how": "tp"}):
        assert found["fused"] is True
        assert HOST_READS.isdisjoint(found["names"])
        assert found["names"].count("_fused_adamw_") == 2, "of the plain parameters, and of the shards"
        assert found["names"].count("_foreach_norm") == found["names"].count("_foreach_mul_") == 1


def test_every_kind_of_kernel_updates_a_mix_as_it_updates_plain_parameters(
    processes: Processes, tmp_path: Path
) -> None:
    for gaps in processes.results(JOBS, "kernels", tmp_path):
        assert len(gaps) == 6
        assert max(gaps.values()) < 1e-5, gaps


def test_a_mix_is_clipped_by_hand(processes: Processes, tmp_path: Path) -> None:
    one, other = processes.results(JOBS, "clip", tmp_path, {"how": "tp"})
    assert one == other
    assert one[0] > 1
    assert one[1] == pytest.approx(1.0, rel=1e-5)


@pytest.fixture(scope="module")
def one_process(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [found] = processes.results(JOBS, "training", tmp_path_factory.mktemp("one"), {}, ranks=1)
    return dict(found)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_clipped_training_of_shards_is_that_of_one_process(
    processes: Processes, tmp_path: Path, one_process: dict[str, Any], ranks: int
) -> None:
    assert all(norm > 0.5 for norm in one_process["norms"]), "else nothing is clipped"
    for found in processes.results(JOBS, "training", tmp_path, {"size": ranks}, ranks=ranks):
        assert found["losses"] == pytest.approx(one_process["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(one_process["norms"], rel=1e-5)


@pytest.mark.parametrize(
    ("how", "ranks", "where"),
    [
        pytest.param("fsdp", 3, "head", marks=pytest.mark.slow),
        pytest.param("hsdp", 4, "head", marks=pytest.mark.slow),
        pytest.param("tp", 2, "norm", marks=pytest.mark.slow),
        ("fsdpxtp", 4, "norm"),
    ],
)
def test_all_ranks_keep_out_a_nan_that_one_rank_has(
    processes: Processes, tmp_path: Path, how: str, ranks: int, where: str
) -> None:
    results = processes.results(JOBS, "bad_shard", tmp_path, {"how": how, "where": where}, ranks=ranks)
    assert all(one == results[0] for one in results), "also of a replica, and of a parameter that is whole on each rank"
    for one in (results[0][:3], results[0][3:]):
        assert [applied for applied, _, _ in one] == [True, False, True]
        assert one[1][1:] == ["nan", 1]


@pytest.mark.parametrize(("policy", "how", "ranks"), [("skip", "fsdp", 2), ("raise", "hsdp", 4)])
def test_all_ranks_of_a_training_act_at_the_same_step_on_a_nan_that_one_rank_has(
    processes: Processes, tmp_path: Path, policy: str, how: str, ranks: int
) -> None:
    results = processes.results(JOBS, "bad_shard_in_the_loop", tmp_path, {"how": how, "policy": policy}, ranks=ranks)
    if policy == "skip":
        expected = {"skips": [0, 0, 1, 1, 1, 1], "error": "", "step": 6}
    else:
        expected = {"skips": [0, 0], "error": "NaN or infinity in the loss or gradient norm of step 3", "step": 2}
    assert results == ranks * [expected]


@pytest.mark.parametrize(("how", "ranks"), [("fsdp", 2), pytest.param("tp", 2, marks=pytest.mark.slow)])
def test_an_optimizer_of_megatrons_convention_is_judged_by_the_whole_norm(
    processes: Processes, tmp_path: Path, how: str, ranks: int
) -> None:
    for one in processes.results(JOBS, "foreign", tmp_path, {"how": how}, ranks=ranks):
        assert one["norm"] == pytest.approx(one["exact"], rel=1e-6)
        assert one["applied"] == [False, True]


@pytest.mark.parametrize("dtype", ["single", pytest.param("double", marks=pytest.mark.slow)])
def test_several_meshes_missing_gradients_and_marks_count_once(
    processes: Processes, tmp_path: Path, dtype: str
) -> None:
    results = processes.results(JOBS, "several_meshes", tmp_path, {"dtype": dtype}, ranks=4)
    assert len({one["bits"] for one in results}) == 1
    for one in results:
        assert one["norm"] == pytest.approx(one["exact"], rel=1e-6 if dtype == "single" else 1e-14)
        assert one["dtype"] == ("torch.float32" if dtype == "single" else "torch.float64")
        assert one["zeros"] == one["expected"]
        assert one["calls"] == 3, "of the four ranks, and of both dimensions of the square"
        assert one["moved"] < 1e-6


def test_partial_parameters_are_refused_and_a_partial_gradient_is_added_up(
    processes: Processes, tmp_path: Path
) -> None:
    for one in processes.results(JOBS, "partial", tmp_path):
        assert "parameter 0 of the optimizer, (3,), must be sharded or replicated" in one["own"]
        assert one["clipped"].startswith("parameter 0 of those to clip, (3,), must be sharded or replicated")
        assert one["named"].startswith("layers.0.norm must be sharded or replicated")
        assert one["foreign"].startswith("summand must be sharded or replicated")
        assert one["norm"] == pytest.approx(3 * 3**0.5)
        assert one["value"] == [-3.0] * 3
