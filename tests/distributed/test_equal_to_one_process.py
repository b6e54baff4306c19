"""Runs that are divided by tensors or stages say what one process says: events, losses, logs, trackers, exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from onstep.record import read_records, without_wall_clock
from tests.support.forked_processes import Processes
from tests.support.jobs.equality_jobs import BAD_STEP, OF_MICRO_BATCHES
from tests.support.reports import close
from tests.support.tracker_files import scalars

pytestmark = pytest.mark.distributed

SLOW = pytest.mark.slow
JOBS = "tests.support.jobs.equality_jobs"
DIVIDED = {
    "tp2 sp": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
    "pp2 interleaved": [
        "parallel.pipeline_model_parallel_size=2",
        "parallel.virtual_pipeline_model_parallel_size=2",
        "parallel.pipeline_schedule=Interleaved1F1B",
    ],
}
OF_RANKS = {"place", "num_ranks"}
"""What tells which rank has written a record."""
OF_CLOCKS = ("*_runtime", "*_per_second", "tokens_per_second")


def timeless(value: Any) -> Any:
    """The same without times, and without what names ranks."""
    if isinstance(value, dict):
        kept = [key for key in value if key not in OF_RANKS and not any(fnmatchcase(key, one) for one in OF_CLOCKS)]
        return {key: timeless(value[key]) for key in kept}
    if isinstance(value, str):
        return re.sub(r"\branks? \d+(, \d+)*", "rank 0", value)
    return [timeless(one) for one in value] if isinstance(value, list) else value


def written(run: Path) -> dict[str, Any]:
    """What a run leaves for readers: its logs, its record and the points of its tracker."""
    logs = {path.name: read_records(path) for path in sorted(run.glob("runs/run/trainer_logs*.json"))}
    logs = {name: [without_wall_clock(record) for record in records] for name, records in logs.items()}
    for path in sorted(run.glob("runs/run/record*.jsonl")):
        logs[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
    points = {str(place.relative_to(run)): scalars(place) for place in (run / "tb", run / "tb" / "vs_samples")}
    points = {place: {tag: [list(one) for one in of] for tag, of in tags.items()} for place, tags in points.items()}
    status = json.loads((run / "runs/run/run.json").read_text())["status"]
    return {"logs": timeless(logs), "points": points, "status": status}


class Heard:
    """The events of one start of a run on one rank."""

    def __init__(self, lines: list[Any]) -> None:
        of_passes = [line for line in lines if line[0] in OF_MICRO_BATCHES]
        self.passes = [line[:2] for line in of_passes]
        self.decisions = timeless([line for line in lines if line[0] == "on_decision"])
        self.others = timeless([line for line in lines if line not in of_passes and line[0] != "on_decision"])


@pytest.mark.parametrize("policy", ["skip", *(pytest.param(one, marks=SLOW) for one in ("rollback", "stop", "raise"))])
def test_a_divided_run_with_a_nan_on_one_rank_says_what_one_process_says(
    processes: Processes, tmp_path: Path, policy: str
) -> None:
    """Where a pipeline has the passes of micro-batches in another order, their events are as many."""
    text = str(Path(__file__).parents[2] / "LICENSE")
    common = {"corpus": text, "cache": str(tmp_path / "cache"), "policy": policy}
    [[starts]] = processes.results(JOBS, "runs", tmp_path, {**common, "layouts": {"one": []}, "spoiled": 0}, ranks=1)
    found = processes.results(JOBS, "runs", tmp_path, {**common, "layouts": DIVIDED, "spoiled": 1})
    reference = close(written(tmp_path / "one"))
    for number, name in enumerate(DIVIDED):
        order: Callable[[list[Any]], list[Any]] = sorted if name.startswith("pp") else list
        for rank, of_rank in enumerate(found):
            for (lines, code), (own_lines, own_code) in zip(starts, of_rank[number], strict=True):
                expected, own = Heard(lines), Heard(own_lines)
                assert own_code == code
                assert own.others == close(expected.others), (name, rank)
                assert order(own.passes) == order(expected.passes), (name, rank)
                assert own.decisions == ([] if rank else close(expected.decisions)), (name, rank)
        assert written(tmp_path / name) == reference, name
    bad = [line[2] for line in starts[0][0] if line[:2] == ["on_train_step_end", BAD_STEP - 1]]
    assert policy != "skip" or [one["skipped_iter"] for one in bad] == [1]
    assert str(starts[-1][1]).startswith("NonFiniteError: ") == (policy == "raise")
