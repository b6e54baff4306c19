"""The order in which gradients are summed over ranks is a property of the model, not of what a process has done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "settings",
    [
        {"ddp": {}},
        {"ddp": {"bucket_cap_mb": 0.03}},
        {"ddp": {"static_graph": True, "bucket_cap_mb": 0.03}},
        {"ddp": {"static_graph": True, "find_unused_parameters": True}},
        {"ddp": {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.03}, "sparse": True},
        {"ddp": {"bucket_cap_mb": 0.03}, "frozen": True},
    ],
    ids=str,
)
def test_a_new_wrapper_sums_as_one_that_has_taken_steps(
    processes: Processes, tmp_path: Path, settings: dict[str, Any]
) -> None:
    results = processes.results("tests.support.jobs.rank_jobs", "buckets", tmp_path, settings, ranks=3)
    assert results == [{"same": True, "unwrapped": True}] * 3
