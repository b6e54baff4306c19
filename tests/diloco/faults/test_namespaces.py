"""A partition of a real network: workers in network namespaces, whose cables are unplugged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.diloco.namespaces import UNSHARE, are_available

pytestmark = [pytest.mark.faults, pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[3]


def test_a_minority_behind_unplugged_cables_never_commits(tmp_path: Path) -> None:
    if not are_available():
        pytest.skip("this machine does not let its users make network namespaces")
    command = [*UNSHARE, sys.executable, "-m", "tests.support.diloco.namespaces", str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["rounds"] >= 5
    assert counts["steps_counted"] > 0
