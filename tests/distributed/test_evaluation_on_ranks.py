"""Evaluations on two ranks give what one process gives: predictions, metrics by batch, generated ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes, output_of

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.evaluation_jobs"


def results(processes: Processes, directory: Path, ranks: int, micro_batch_size: int) -> list[dict[str, Any]]:
    settings = {"micro_batch_size": micro_batch_size}
    codes = processes.run(JOBS, "evaluate", directory, settings, ranks=ranks)
    assert codes == [0] * ranks, output_of(directory)
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def test_two_ranks_evaluate_as_one(processes: Processes, tmp_path: Path) -> None:
    """The last of seven samples leaves the second rank a repeated one, which counts nowhere."""
    (alone,) = results(processes, tmp_path / "alone", 1, micro_batch_size=4)
    one, other = results(processes, tmp_path / "both", 2, micro_batch_size=2)
    for found in (one, other):
        assert found["calls"] == alone["calls"]
        assert [(len(labels), is_last) for labels, is_last in found["calls"]] == [(4, False), (3, True)]
        assert found["metrics"]["eval_rows"] == 7
        assert found["metrics"]["eval_loss"] == pytest.approx(alone["metrics"]["eval_loss"], rel=1e-6)
        assert found["doubled"] == pytest.approx(2 * alone["metrics"]["eval_loss"], rel=1e-6)
        assert [len(batch) for batch in found["batches"]] == [2, 2, 2, 1]
        assert [label for batch in found["batches"] for label in batch] == [label for (label,) in alone["batches"]]
        assert (found["generated"], found["labels"]) == (alone["generated"], alone["labels"])
    ids = [[1, 2], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3]]
    assert one["generated"] == [row + [-100] * (4 - len(row)) for row in ids]
