"""Muon of matrices in shards, which are orthogonalized whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked_processes import Processes


@pytest.mark.distributed
@pytest.mark.parametrize(("mesh", "matrices", "precise"), [([3], 5, False), ([2, 2], 5, False), ([3], 2, True)])
def test_matrices_in_shards_are_updated_as_whole_ones_to_the_bit(
    processes: Processes, tmp_path: Path, mesh: list[int], matrices: int, precise: bool
) -> None:
    settings = {"mesh": mesh, "matrices": matrices, "precise": precise, "hooked": len(mesh) == 2}
    found = processes.results("tests.support.jobs.layout_jobs", "muon", tmp_path, settings, ranks=len(mesh) + 2)
    assert all(all(of_rank) for of_rank in found), found
