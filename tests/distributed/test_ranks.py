"""Real gloo processes: the losses of one process, and one decision at one step on all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("rank_script.py")


def run_ranks(ranks: int, job: str, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Run `rank_script.py` under torchrun; what each rank wrote, in rank order."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [str(SCRIPT), job, str(folder), json.dumps(settings)]
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def single(corpus: Path, token_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of one process, for each door."""
    folder = tmp_path_factory.mktemp("single")
    losses = {}
    for job in ("pretrain", "trainer"):
        place = folder / job
        place.mkdir()
        losses[job] = run_ranks(1, job, place, corpus=str(corpus), cache=str(token_cache))[0]["losses"]
    return losses


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("job", ["pretrain", "trainer"])
def test_ranks_give_the_losses_of_one_process(
    ranks: int, job: str, single: dict[str, list[float]], corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    results = run_ranks(ranks, job, tmp_path, corpus=str(corpus), cache=str(token_cache))
    for result in results:
        # float32 gradients summed over ranks instead of rows
        assert result["losses"] == pytest.approx(single[job], rel=1e-5)
        assert result["evaluation"] == results[0]["evaluation"]
    assert len({tuple(map(tuple, result["sample_ids"])) for result in results}) == ranks, "ranks must differ in data"


@pytest.mark.parametrize("how", ["stop", "abort", "flag"])
def test_a_stop_asked_on_one_rank_stops_all_at_the_same_step(
    how: str, corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    results = run_ranks(2, "stop", tmp_path, corpus=str(corpus), cache=str(token_cache), how=how)
    assert [result["step"] for result in results] == [3, 3]
    assert all("'Stopper'" in result["stopped_by"] and "on rank 1" in result["stopped_by"] for result in results)
    assert all(result["told"].count("on_train_end") == 1 for result in results)
    assert all(result["told"][-1] == "on_run_end" for result in results)


def test_requests_for_log_and_evaluation_on_one_rank_are_done_on_all(
    corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    results = run_ranks(2, "requests", tmp_path, corpus=str(corpus), cache=str(token_cache))
    assert results[0]["logged"] == results[1]["logged"] == [2]
    assert results[0]["evaluated"] == results[1]["evaluated"] == [4]


def test_a_nan_on_one_rank_ends_all_and_names_the_rank_and_its_samples(
    corpus: Path, token_cache: Path, tmp_path: Path
) -> None:
    results = run_ranks(2, "nan", tmp_path, corpus=str(corpus), cache=str(token_cache))
    for result in results:
        assert "step 3" in result["error"]
        assert "rank 1" in result["error"]
        assert "rank 0" not in result["error"]
        assert str(results[1]["bad_ids"]) in result["error"]
        assert result["weights_changed"] is False
        assert result["reason"] == "failed"


def test_a_process_may_open_and_close_one_group_after_another(tmp_path: Path) -> None:
    results = run_ranks(2, "groups", tmp_path, times=8)
    assert [result["sums"] for result in results] == [[2.0] * 8] * 2


def test_predictions_come_back_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    results = run_ranks(2, "predict", tmp_path)
    for result in results:
        assert result["predictions"] == [2.0 * i for i in range(7)]
        assert result["loss"] == pytest.approx(sum((2.0 * i - i) ** 2 for i in range(7)) / 7)
