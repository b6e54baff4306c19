"""Without keys no tracker reaches for the network, from any of its processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tracker_reading import KEYS

SCRIPT = """
import sys
from pathlib import Path
from onstep.trackers import RunIdentity, make_tracker

run = RunIdentity("pretty", "0123456789abcdef" * 2, Path(sys.argv[1]), {"lr": 0.5})
for name in ("wandb", "mlflow", "comet", "trackio"):
    tracker = make_tracker(name)
    tracker.open(run, {})
    for step in range(5):
        tracker.log({"train/loss": 1.0}, step, 0.0)
    tracker.close("completed")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="takes strace")
def test_no_process_of_a_tracker_connects_to_anything_but_itself(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in KEYS}
    environment |= {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    environment.pop("PYTEST_CURRENT_TEST", None)  # some packages stay quiet where they are tested
    calls = tmp_path / "calls"
    watched = ["strace", "-f", "-qq", "-e", "trace=connect,sendto", "-o", str(calls)]
    command = [*watched, sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert "AF_UNIX" in calls.read_text()  # W&B's process is talked to, so strace has seen something
    assert [line for line in calls.read_text().splitlines() if "AF_INET" in line] == []
