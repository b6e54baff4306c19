"""A value head on a sequence that is split over ranks, against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onstep.distributed.shards import gather_sequence

SCRIPT = Path(__file__).with_name("sequence_head_script.py")


@pytest.mark.distributed
def test_a_split_sequence_has_the_values_and_gradients_of_the_whole_one() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("equal") == 2


def test_a_group_of_one_changes_nothing() -> None:
    part = torch.ones(2, 3)

    assert gather_sequence(part, None) is part
