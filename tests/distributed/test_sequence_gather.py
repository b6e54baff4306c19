"""A value head on a sequence that is split over ranks, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onstep.distributed.shards import gather_sequence
from tests.support.forked_processes import Processes, output_of


@pytest.mark.distributed
def test_a_split_sequence_has_the_values_and_gradients_of_the_whole_one(processes: Processes, tmp_path: Path) -> None:
    codes = processes.run("tests.support.jobs.sequence_head_jobs", "head", tmp_path, {}, ranks=2)
    assert codes == [0, 0], output_of(tmp_path)


def test_a_group_of_one_changes_nothing() -> None:
    part = torch.ones(2, 3)

    assert gather_sequence(part, None) is part
