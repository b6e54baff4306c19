"""A disk that is full, or a file that may not grow: the old checkpoint stays, the error says what was needed, and the
metrics log of a run whose disk was full is complete once there is room.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onstep.checkpoint.storage.store import FileStore
from onstep.errors import CheckpointError
from tests.support.faults.fault_saves import DRIVERS, debris, what_is_wrong
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.faults

SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def why_no_small_disk() -> str | None:
    """Why this machine cannot mount a small disk of its own for one process; None if it can."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    command = [*SMALL_DISK, "mount -t tmpfs -o size=1m none /mnt"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"a mount namespace is refused: {tried.stderr.strip()[:200]}"


@pytest.mark.skipif(why_no_small_disk() is not None, reason=str(why_no_small_disk()))
@pytest.mark.parametrize("checked", [pytest.param("checked", marks=pytest.mark.slow), "unchecked"])
def test_a_full_disk_leaves_the_old_checkpoint_and_the_next_save_works(checked: str, tmp_path: Path) -> None:
    job = 'mount -t tmpfs -o size=8m none "$1" && exec "$2" -m "$3" "$1/checkpoints" "$4"'
    module = "tests.support.faults.child_full_disk"
    command = [*SMALL_DISK, job, "sh", str(tmp_path), sys.executable, module, checked]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["first"] == report["after"] == ""
    error = report["too large"]
    assert str(tmp_path) in error
    named = [int(number) for number in re.findall(r"\d{5,}", error)]
    if checked == "checked":
        assert any(number > 16 * 2**20 for number in named), "what the whole save needs"
        assert any(0 < number < 8 * 2**20 for number in named), "what is free"
    else:
        assert re.search(
            r"write of \d+ bytes to .*: No space left on device; \d+ bytes are needed, \d+ bytes are free", error
        )
    assert report["newest"] == 10
    assert report["debris"] == []
    assert report["steps"] == ["checkpoint-10", "checkpoint-30", "latest"]


@pytest.mark.skipif(why_no_small_disk() is not None, reason=str(why_no_small_disk()))
def test_a_full_disk_of_the_run_directory_costs_no_point_that_a_checkpoint_covers(
    tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    disk.mkdir()
    elsewhere.mkdir()
    job = 'mount -t tmpfs -o size=1m none "$1" && exec "$5" -m "$6" "$1" "$2" "$3" "$4"'
    module = "tests.support.faults.child_full_log"
    places = [str(disk), str(elsewhere), str(corpus), str(token_cache)]
    command = [*SMALL_DISK, job, "sh", *places, sys.executable, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ}, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["killed"], report["resumed"], report["waited"]) == (-9, 0, 0), report["output"]
    assert "its records are kept in memory and in checkpoints" in report["output"]
    assert "Traceback" not in report["output"]
    assert [record["global_step"] for record in json.loads(report["full"])] == [1, 2]
    for run in (report["whole"], report["in one process"]):
        assert run.pop("gaps") == 0
        expected = [value for _, value in run["record.jsonl"]]
        for name, points in run.items():
            assert [step for step, _ in points] == list(range(1, 10)), name
            assert [value for _, value in points] == pytest.approx(expected, rel=1e-6), name


def test_a_file_that_may_not_grow_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The limit of the process on file sizes is the full disk that needs no special rights."""
    root = tmp_path / "checkpoints"
    DRIVERS["direct"].save(root, 10, "a", FileStore())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            DRIVERS["direct"].save(root, 20, "b", FileStore())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(r"write of \d+ bytes to .*optimizer\.safetensors failed: File too large", str(caught.value))
    assert re.search(r"\d+ bytes are needed, \d+ bytes are free", str(caught.value))
    assert not debris(root)
    assert not what_is_wrong(root, DRIVERS["direct"], {(10, "a")}, pointer=10)
