"""A run on spot instances, as the page "On a cluster" starts it: each machine is new, and the run is in a bucket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from onstep.mirror.remote_checkpoints import RemoteCheckpoints
from onstep.record import read_records
from onstep.stores.bucket import Bucket
from tests.support.object_store import BUCKET, environment_of, s3_server
from tests.support.slurm_runs import PACED
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.distributed]
RUN = f"s3://{BUCKET}/runs/tiny_gpt"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


class Machine:
    """A new machine, on which nothing is but a home directory, as far as the run can see."""

    def __init__(self, home: Path, server: str, seconds_of_a_step: float = 0.0) -> None:
        home.mkdir()
        (home / "pace").write_text(f"{seconds_of_a_step} 1")
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "XDG_"))}
        self._environment = {**kept, **environment_of(server), "HOME": str(home)}

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command of `onstep`, in a process group of its own."""
        command = [sys.executable, "-m", "onstep", *words]
        with (self.home / "output.txt").open("ab") as output:
            return subprocess.Popen(
                command, cwd=self.home, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )

    def said(self) -> str:
        """What its commands have printed."""
        return (self.home / "output.txt").read_text()

    def run(self, *words: str) -> str:
        """What a command prints, which must succeed."""
        before = len(self.said()) if (self.home / "output.txt").exists() else 0
        assert self.start(*words).wait(PATIENCE) == 0, self.said()
        return self.said()[before:]


def test_a_run_moves_from_machine_to_machine(
    server: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(server).items():
        monkeypatch.setenv(name, value)
    command = ["launch", "--max-restarts", "3", "--", "train", "tiny_gpt", "run.output_dir=s3://bucket/runs"]
    command += ["--import", str(PACED), "callbacks=[paced:Paced]", f"dataset.paths=[{corpus}]", "run.lease_seconds=5"]
    command += ["checkpoint.save_interval=5", "train.train_iters=30", "logger.log_interval=1"]
    checkpoints = RemoteCheckpoints(Bucket(RUN))

    def wait_for(step: int, launch: subprocess.Popen[bytes]) -> None:
        until(
            lambda: any(one.step >= step and one.is_committed for one in checkpoints.all()),
            machine.said,
            while_true=lambda: launch.poll() is None,
        )

    machine = Machine(tmp_path / "asked", server, seconds_of_a_step=0.2)
    launch = machine.start(*command)
    wait_for(5, launch)
    launch.send_signal(signal.SIGTERM)  # to the launch alone, as `KillMode=mixed` says
    assert launch.wait(PATIENCE) == 75, machine.said()
    saved = max(one.step for one in checkpoints.all())

    machine = Machine(tmp_path / "lost", server, seconds_of_a_step=0.2)
    launch = machine.start(*command)
    wait_for(saved + 5, launch)
    for child in psutil.Process(launch.pid).children(recursive=True):
        child.kill()
    os.killpg(launch.pid, signal.SIGKILL)
    launch.wait()

    machine = Machine(tmp_path / "last", server)
    machine.run(*command)
    steps = [one["global_step"] for one in read_records(next(machine.home.rglob("trainer_logs.json"))) if "loss" in one]
    assert steps == list(range(1, 31))

    elsewhere = Machine(tmp_path / "elsewhere", server)
    assert "finished" in elsewhere.run(*command)
    assert "tiny_gpt completed at step 30." in elsewhere.run("why", RUN)
    assert "30" in elsewhere.run("checkpoint", "list", RUN)
