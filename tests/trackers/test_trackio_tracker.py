"""The Trackio tracker on a local store; Trackio settles on its directory when it is imported, so a process has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.tracker_reading import trackio_logs
from tests.support.waiting import PATIENCE

SCRIPT = """
import math, sys, threading
from pathlib import Path
from onstep.trackers import RunIdentity
from onstep.trackers.services.trackio_tracker import TrackioTracker

tracker = TrackioTracker(project="p")
for segment, start in enumerate((0, 3)):
    run = RunIdentity("pretty", "run-1", Path(sys.argv[1]), {"lr": 0.5, "_own": 1}, start_step=start)
    tracker.open(run, tracker.state_dict())
    for step in range(start + 1, start + 6):
        tracker.log({"train/loss": 10.0 * segment + step, "train/nan": math.nan}, step, 0.0)
    tracker.text("samples", "once", start + 5)
    tracker.close("preempted")
    tracker.close("preempted")
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""


def test_a_run_goes_on_in_the_local_store_and_nothing_is_printed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    environment = {**os.environ, "TRACKIO_DIR": str(store), "HOME": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    logs = trackio_logs(store, "p", "pretty")
    assert list(logs) == ["run-1"]
    points = [(row["step"], row["train/loss"]) for row in logs["run-1"] if "train/loss" in row]
    assert points == [(step, float(step)) for step in range(1, 6)] + [(step, 10.0 + step) for step in range(4, 9)]
    texts = [row["samples"] for row in logs["run-1"] if "samples" in row]
    assert len(texts) == 2
