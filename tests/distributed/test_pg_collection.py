"""The process groups of a run under Megatron's names, against Megatron's own arithmetic of ranks."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.metrics import calc_params_l2_norm
from onstep.training import GlobalState
from tests.support.forked_processes import Processes
from tests.support.small_runs import TinyModel

JOBS = "tests.support.jobs.group_jobs"


def megatron(rank: int, *, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1) -> dict[str, Any]:
    """The ranks of a rank's groups: neighbors are tensor-parallel, then context, then data, then stages.

    Experts see the ranks of a stage as tensor-parallel, then expert-parallel, then data-parallel.
    """
    dense = {
        ((p * dp + d) * cp + c) * tp + t: {"tp": t, "cp": c, "dp": d, "pp": p}
        for p, d, c, t in product(range(pp), range(dp), range(cp), range(tp))
    }
    edp = dp * cp // ep
    expert = {
        ((p * edp + d) * ep + e) * tp + t: {"tp": t, "ep": e, "dp": d, "pp": p}
        for p, d, e, t in product(range(pp), range(edp), range(ep), range(tp))
    }

    def like(places: dict[int, dict[str, int]], *free: str) -> list[int]:
        own = places[rank]
        return sorted(
            one for one, at in places.items() if all(at[axis] == own[axis] for axis in at if axis not in free)
        )

    stages = like(dense, "pp")
    ends = sorted({stages[0], stages[-1]})
    return {
        "tp": like(dense, "tp"), "pp": stages, "cp": like(dense, "cp"), "dp": like(dense, "dp"),
        "dp_cp": like(dense, "dp", "cp"), "mp": like(dense, "tp", "pp"), "tp_dp_cp": like(dense, "tp", "dp", "cp"),
        "ep": like(expert, "ep"), "expt_tp": like(expert, "tp"), "expt_dp": like(expert, "dp"),
        "tp_ep_pp": like(expert, "tp", "ep", "pp"),
        "embd": ends if rank in ends else None, "pos_embd": stages[:1] if rank == stages[0] else None,
    }  # fmt: skip


def halves(dp: int) -> dict[str, int]:
    """Data parallelism as replicas of shards, where there are enough ranks."""
    return {"dp_replicate": 2, "dp_shard": dp // 2} if dp % 2 == 0 else {"dp_shard": dp}


LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2}, {"dp": 2, "ep": 2}],
    3: [{"pp": 3}, {"dp": 3}],
    4: [{"tp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"cp": 2, "dp": 2, "ep": 4}, {"pp": 2, "dp": 2, "ep": 2}, {"dp": 4}],
}


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_groups_have_the_ranks_of_megatron(processes: Processes, tmp_path: Path, ranks: int) -> None:
    sizes = [
        {axis: size for axis, size in one.items() if axis != "dp"} | halves(one.get("dp", 1)) for one in LAYOUTS[ranks]
    ]
    norm = calc_params_l2_norm(TinyModel(), None)
    results = processes.results(JOBS, "groups", tmp_path, {"layouts": sizes}, ranks=ranks)
    for rank, of_rank in enumerate(results):
        for layout, found in zip(LAYOUTS[ranks], of_rank, strict=True):
            expected = megatron(rank, **layout)
            assert found["ranks"] == expected, (rank, layout)
            assert found["before"] == 0, "until one is asked for"
            assert found["largest"] == max(expected["mp"])
            assert found["all_but_0"] == (0 not in expected["mp"])
            assert found["memory"] == max(expected["pp"])
            assert found["norm"] == pytest.approx(norm * math.sqrt(len(expected["pp"])))  # each stage has a model
            assert found["shares"] == (expected["mp"] if len(expected["mp"]) > 1 else None)


@pytest.mark.distributed
def test_functions_that_take_groups_give_what_one_process_gives_for_a_model_in_tensors_and_stages(
    processes: Processes, tmp_path: Path
) -> None:
    """With real ranks of tp2 x pp2, groups of which some are None, and a weight in summands."""
    keys = ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"]
    [one] = processes.results(JOBS, "model", tmp_path, {"keys": []}, ranks=1)
    of_ranks = processes.results(JOBS, "model", tmp_path, {"keys": keys}, ranks=4)
    for rank, found in enumerate(of_ranks):
        assert found["norm"] == pytest.approx(one["norm"], rel=1e-12)
        assert found["without tp"] == found["norm"]
        assert found["by attributes"] == pytest.approx(one["norm"], rel=1e-12)
        assert math.hypot(of_ranks[0]["of a stage"], of_ranks[2]["of a stage"]) == pytest.approx(one["norm"], rel=1e-12)
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-12)
        assert (found["largest"], found["all"]) == (one["largest"], one["all"]) == (5, True)
        assert found["one not"] is False
        assert found["memory"] == 7 - rank % 2
        assert not found["agrees"], "stages have the norm of all ranks anyway"
        assert found["summands"] == pytest.approx(1.0, rel=1e-12)
        assert "the squares of partial sums do not add up" in found["refused"]


@pytest.mark.distributed
def test_groups_of_other_ranks_are_refused_and_a_run_with_data_parallelism_makes_none(
    processes: Processes, tmp_path: Path
) -> None:
    for rank, found in enumerate(processes.results(JOBS, "given", tmp_path)):
        said = rf"pg_collection.dp has the ranks [{rank}], but that group of this run has [0, 1]"
        assert len(found["errors"]) == 2
        assert all(said in error for error in found["errors"]), found
        assert found["groups"] == 0


def test_a_state_without_a_process_group_says_how_to_get_groups() -> None:
    groups = GlobalState(ConfigContainer()).pg_collection
    assert groups.ranks("dp") == [0]
    with pytest.raises(ConfigError, match="use the world that open_world returns"):
        _ = groups.dp
