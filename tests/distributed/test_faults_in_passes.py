"""A rank that dies, fails or hangs in the passes of a layout: all ranks end soon, and one is named by coordinates."""

from __future__ import annotations

import json
import re
import time
from itertools import product
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes, output_of

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.fault_jobs"
TENSORS = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
STAGES = ["parallel.pipeline_model_parallel_size=2"]
TWO = "parallel.virtual_pipeline_model_parallel_size=2"
V = "parallel.pipeline_schedule=ZBVZeroBubble"
SHARDS = ["parallel.data_parallel_shard_size=2"]
UPDATES = ["ddp.use_distributed_optimizer=true"]
LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "tp2 sp": (["tp"], TENSORS),
    "pp2 1F1B": (["pp"], STAGES),
    "pp2 interleaved": (["pp"], [*STAGES, TWO]),
    "pp2 ZBV": (["pp"], [*STAGES, V]),
    "tp2 sp x pp2": (["tp", "pp"], [*TENSORS, *STAGES]),
    "tp2 sp x pp2 ZBV": (["tp", "pp"], [*TENSORS, *STAGES, V]),
    "fsdp2 x pp2 interleaved": (["dp_shard", "pp"], [*SHARDS, *STAGES, TWO]),
    "distopt2 x pp2": (["dp_shard", "pp"], [*UPDATES, *STAGES]),
}
"""The axes of two ranks each, the fastest first, and the keys."""
ENDS = {
    "kill": r"is gone \(its process was killed or crashed\)",
    "stop": "hangs: its process has been stopped",
    "hang": "hangs: no progress",
    "allocation": "failed first at step 1, while .*OutOfMemoryError: a fault of the test",
}
QUICK = [("tp2 sp x pp2", "hang", "forward", 3)]


def place(axes: list[str], rank: int) -> str:
    """What a layout of axes of two ranks each, the fastest first, calls a rank."""
    return ", ".join([f"rank {rank}", *(f"{axis} {rank >> bit & 1}" for bit, axis in enumerate(axes))])


def rows() -> list[object]:
    """Each layout, fault and pass with a suspect other than rank 0; rank 0 for one kind of pass."""
    found = []
    for (layout, (axes, _)), fault, event in product(LAYOUTS.items(), ENDS, ("forward", "backward")):
        last = 2 ** len(axes) - 1
        found += [(layout, fault, event, suspect) for suspect in dict.fromkeys((last, last - 1 or last))]
    return [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in found if one not in QUICK)]


@pytest.mark.parametrize(("layout", "fault", "event", "suspect"), rows())
def test_all_ranks_end_and_one_is_named_by_its_coordinates(
    processes: Processes,
    tmp_path: Path,
    corpus: Path,
    token_cache: Path,
    layout: str,
    fault: str,
    event: str,
    suspect: int,
) -> None:
    axes, keys = LAYOUTS[layout]
    settings = {"corpus": str(corpus / "colorsys.py"), "cache": str(token_cache), "keys": keys, "layers": 4}
    settings |= {"event": event, "fault": fault, "suspect": suspect, "nth": 30}
    started = processes.start(JOBS, "pretrain", tmp_path, settings, ranks=2 ** len(axes))
    try:
        codes = [one.wait() for one in started]
    finally:
        for one in started:
            one.end()
    seconds = time.time() - (tmp_path / f"at-{event}").stat().st_mtime
    assert all(codes), (codes, output_of(tmp_path))
    error = json.loads((tmp_path / "run" / "run.json").read_text())["error"]
    assert re.match(f"{place(axes, suspect)} {ENDS[fault]}", error), (error, output_of(tmp_path))
    printed = "".join(path.read_text() for path in tmp_path.glob("rank-*.out"))
    assert printed.count("\nfirst failure: ") == 1, output_of(tmp_path)
    print(f"{seconds:.1f} s: {error}")
    assert seconds < 20
