"""Trains in jobs of a real SLURM cluster, and reads what their runs have left."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.forked_processes import Processes, output_of
from tests.support.slurm_cluster import Cluster
from tests.support.train_command import JOBS
from tests.support.waiting import PATIENCE, until
from tests.support.whole_runs import left_by

PACED = Path(__file__).parent / "scripts" / "paced.py"

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=10
#SBATCH --requeue
#SBATCH --open-mode=append
job="${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
export MASTER_ADDR=127.0.0.1  # the nodes of the tests have no addresses of their own
{setup}
srun --label --kill-on-bad-exit=0 --wait=60 {command}
code=$?
echo "start ${{SLURM_RESTART_COUNT:-0}} has ended with $code"
if [ "$code" = 75 ] || [ "$code" -gt 128 ]; then
  command -v scontrol && scontrol requeue "$job"
  exit 75
fi
exit "$code"
"""


class SlurmRuns:
    """Submits jobs that train, each in a directory of its own, and reads what their runs have left."""

    def __init__(self, cluster: Cluster, processes: Processes, root: Path, words: list[str]) -> None:
        self.cluster = cluster
        self._processes, self._root, self._words = processes, root, words

    def place(self, name: str) -> Path:
        """The directory of a job."""
        place = self._root / name
        place.mkdir(exist_ok=True)
        return place

    def run(self, name: str, run: str = "tiny_gpt") -> Path:
        """The directory of its run."""
        return self.place(name) / "runs" / run

    def words(self, *words: str) -> list[str]:
        """Those of `onstep` that train, with the callback that waits for the test."""
        return ["train", "--import", str(PACED), "callbacks=[paced:Paced]", *self._words, *words]

    def undisturbed(self, name: str, *words: str, ranks: int = 2) -> dict[str, Any]:
        """The outcome of the run of as many ranks that nobody disturbs."""
        codes = self._processes.run(JOBS, "cli", self.place(name), {"argv": self.words(*words)}, ranks=ranks)
        assert codes == [0] * ranks, output_of(self.place(name))
        return left_by(self.run(name))

    def submit(
        self,
        name: str,
        *words: str,
        hold: dict[int, int] | None = None,
        options: tuple[str, ...] = (),
        setup: str = "",
        script: str = SCRIPT,
        launcher: tuple[str, ...] = (sys.executable, "-m", "onstep"),
    ) -> str:
        """Submit a job that trains; its id.

        Args:
            name: the name of its directory.
            words: of `onstep train`, as the shell of the script shall read them.
            hold: the step after which it waits for `release`, by how often it was requeued.
            options: of `sbatch`.
            setup: lines of the script before it trains.
            script: with gaps for them and the command.
            launcher: what starts `train ...`.
        """
        place = self.place(name)
        self._hold(name, hold)
        command = " ".join([shlex.join([*launcher, *self.words()]), *words])
        (place / "job.sbatch").write_text(script.format(setup=setup, command=command))
        return self.cluster.submit(place / "job.sbatch", *options)

    def launch(self, name: str, *words: str, hold: dict[int, int] | None = None, options: tuple[str, ...] = ()) -> str:
        """Submit a job of two nodes by `onstep launch --slurm`, with further options of it; its id. See `submit`."""
        self._hold(name, hold)
        command = ["onstep", "launch", "--slurm", "--requeue", "--nodes=2", "--nproc=1", "--time=10", *options]
        done = subprocess.run(
            [*command, "--", *self.words(*words)],
            cwd=self.place(name),
            env=self.cluster.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        submitted = re.search(r"Submitted batch job (\d+)", done.stdout)
        assert submitted is not None, (done.stdout, done.stderr)
        return submitted[1]

    def _hold(self, name: str, hold: dict[int, int] | None) -> None:
        for restart, step in (hold or {}).items():
            (self.place(name) / f"hold-{restart}").write_text(str(step))

    def said(self, name: str) -> str:
        """What the job has printed."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.place(name).glob("*.out")))

    def wait_for(self, name: str, text: str) -> None:
        """Until the job has printed it."""
        until(lambda: text in self.said(name), lambda: self.said(name))

    def held(self, name: str, restart: int = 0) -> list[int]:
        """The process ids of both ranks, once they wait for `release`."""
        files = [self.place(name) / f"held-{restart}-{rank}" for rank in range(2)]
        until(lambda: all(file.exists() and file.read_text() for file in files), lambda: self.said(name))
        return [int(file.read_text()) for file in files]

    def release(self, name: str, restart: int = 0) -> None:
        """Let the ranks go on."""
        (self.place(name) / f"go-{restart}").touch()

    def finish(self, name: str, job: str, restarts: int) -> dict[str, Any]:
        """The outcome, once the job has ended well after as many restarts."""
        until(lambda: self.cluster.value(job, "JobState") == "COMPLETED", lambda: self.said(name), seconds=3 * PATIENCE)
        assert self.cluster.value(job, "Restarts") == str(restarts), self.said(name)
        return left_by(self.run(name))
