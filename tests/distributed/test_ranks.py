"""Real gloo processes: the losses of one process, and one decision at one step on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import torchrun
from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.rank_jobs"


RunRanks = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run_ranks(processes: Processes) -> RunRanks:
    """Runs a job of `rank_jobs` on some ranks; what each returned, in rank order."""

    def run(ranks: int, job: str, directory: Path, **settings: Any) -> list[dict[str, Any]]:
        return processes.results(JOBS, job, directory, settings, ranks=ranks)

    return run


@pytest.fixture(scope="module")
def single(
    run_ranks: RunRanks, corpus: Path, token_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[float]]:
    """The losses of one process, for each door."""
    directory = tmp_path_factory.mktemp("single")
    losses = {}
    for job in ("pretrain", "trainer"):
        place = directory / job
        place.mkdir()
        losses[job] = run_ranks(1, job, place, corpus=str(corpus), cache=str(token_cache))[0]["losses"]
    return losses


@pytest.mark.parametrize(
    ("job", "ranks"),
    [("pretrain", 2), ("pretrain", 4), ("trainer", 2), pytest.param("trainer", 4, marks=pytest.mark.slow)],
)
def test_ranks_give_the_losses_of_one_process(
    run_ranks: RunRanks,
    ranks: int,
    job: str,
    single: dict[str, list[float]],
    corpus: Path,
    token_cache: Path,
    tmp_path: Path,
) -> None:
    results = run_ranks(ranks, job, tmp_path, corpus=str(corpus), cache=str(token_cache))
    for result in results:
        # float32 gradients summed over ranks instead of rows
        assert result["losses"] == pytest.approx(single[job], rel=1e-5)
        assert result["evaluation"] == results[0]["evaluation"]
    assert len({tuple(map(tuple, result["sample_ids"])) for result in results}) == ranks, "ranks must differ in data"


@pytest.mark.parametrize("how", ["stop", "abort", "flag"])
def test_a_stop_asked_on_one_rank_stops_all_at_the_same_step(
    run_ranks: RunRanks, how: str, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    results = run_ranks(2, "stop", tmp_path, corpus=str(corpus), cache=str(token_cache), how=how)
    assert [result["step"] for result in results] == [3, 3]
    assert all("'Stopper'" in result["stopped_by"] and "on rank 1" in result["stopped_by"] for result in results)
    assert all(result["told"].count("on_train_end") == 1 for result in results)
    assert all(result["told"][-1] == "on_run_end" for result in results)


def test_requests_for_log_and_evaluation_on_one_rank_are_done_on_all(
    run_ranks: RunRanks, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    results = run_ranks(2, "requests", tmp_path, corpus=str(corpus), cache=str(token_cache))
    assert results[0]["logged"] == results[1]["logged"] == [2]
    assert results[0]["evaluated"] == results[1]["evaluated"] == [4]


def test_a_nan_on_one_rank_ends_all_and_names_the_rank_and_its_samples(
    run_ranks: RunRanks, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    results = run_ranks(2, "nan", tmp_path, corpus=str(corpus), cache=str(token_cache))
    for result in results:
        assert "step 3" in result["error"]
        assert "rank 1" in result["error"]
        assert "rank 0" not in result["error"]
        assert str(results[1]["bad_ids"]) in result["error"]
        assert result["weights_changed"] is False
        assert result["reason"] == "failed"


def test_a_process_may_open_and_close_one_group_after_another(processes: Processes, tmp_path: Path) -> None:
    """Under torchrun, whose store outlives the groups."""
    code, said = torchrun.finish_forked(processes, torchrun.job(JOBS, "groups", {"times": 8}), tmp_path)
    assert code == 0, said[-4000:]
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert [result["sums"] for result in results] == [[2.0] * 8] * 2


def test_predictions_come_back_in_the_order_of_the_dataset(run_ranks: RunRanks, tmp_path: Path) -> None:
    results = run_ranks(2, "predict", tmp_path)
    for result in results:
        assert result["predictions"] == [2.0 * i for i in range(7)]
        assert result["loss"] == pytest.approx(sum((2.0 * i - i) ** 2 for i in range(7)) / 7)
