"""The reporting and saving methods of a Trainer on two ranks: totals are those of one, rank 0 writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.checkpoint.storage.manifest import verify
from tests.support.forked_processes import Processes

JOBS = "tests.support.jobs.trainer_method_jobs"

pytestmark = pytest.mark.distributed


def test_overridden_methods_on_two_ranks_count_and_save_as_on_one(processes: Processes, tmp_path: Path) -> None:
    processes.load("transformers.models.qwen2.modeling_qwen2")
    found = {}
    for ranks in (1, 2):
        directory = tmp_path / str(ranks)
        results = processes.results(JOBS, "overrides", directory, {"batch": 4 // ranks}, ranks=ranks)
        found[ranks] = results[0]
        assert all({**one, "root": ""} == {**results[0], "root": ""} for one in results)
        checkpoint = directory / results[0]["root"] / "checkpoint-3"
        verify(checkpoint)
        assert (checkpoint / "adapter.txt").read_text() == "mine"
        assert (directory / "runs" / "run" / "train_results.json").exists()
        assert (directory / "runs" / "run" / "README.md").exists()
    one, two = ({key: value for key, value in found[ranks].items() if key != "root"} for ranks in (1, 2))
    assert one == two
    assert one["marks"] == [1.0] * 4
    assert one["flos"] == 10 * 10 * (4 + 4 + 2)


def test_accelerates_state_has_the_ranks_of_the_run(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    first, second = processes.results(JOBS, "accelerates_state", tmp_path, {}, ranks=2)
    assert first == {
        "before": [2, 0, True, "DistributedType.MULTI_CPU"],
        "backend": "gloo",
        "triggered": True,
        "share": [1, 2],
    }
    assert second == {**first, "before": [2, 1, False, "DistributedType.MULTI_CPU"], "share": [3]}
