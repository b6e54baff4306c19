"""Muon of matrices in shards, which are orthogonalized whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked_processes import Processes


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [[3], [2, 2]])
def test_matrices_in_shards_are_updated_as_whole_ones_to_the_bit(
    processes: Processes, tmp_path: Path, mesh: list[int]
) -> None:
    found = processes.results("tests.support.jobs.layout_jobs", "muon", tmp_path, {"mesh": mesh}, ranks=len(mesh) + 2)
    assert all(all(of_rank) for of_rank in found), found
