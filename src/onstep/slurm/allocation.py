"""The SLURM allocation that a process runs in: its job, its nodes, how often it was requeued, and when it ends."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

_ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Allocation:
    """The allocation of a SLURM job."""

    job: str
    """The job's id; of a task of an array, `ARRAY_TASK`: the last task has the array's own id, too."""
    nodes: str
    """In SLURM's short form, such as `gpu[007-010]`."""
    restarts: int
    """How often the job was requeued."""

    @classmethod
    def of_process(cls, environment: Mapping[str, str] = os.environ) -> Allocation | None:
        """The allocation that SLURM's environment variables describe; None outside of a job."""
        job = environment.get("SLURM_JOB_ID")
        if not job:
            return None
        if "SLURM_ARRAY_TASK_ID" in environment:
            job = f"{environment.get('SLURM_ARRAY_JOB_ID', job)}_{environment['SLURM_ARRAY_TASK_ID']}"
        restarts = environment.get("SLURM_RESTART_COUNT", "")
        return cls(job, environment.get("SLURM_JOB_NODELIST", "?"), int(restarts) if restarts.isdecimal() else 0)

    @property
    def facts(self) -> dict[str, str | int]:
        """What run.json records about it."""
        return asdict(self)

    def ends_at(self) -> float | None:
        """When it ends, in seconds since the epoch; None without a time limit, or if that is not known.

        Asks `squeue`, which knows a limit that was changed. Where there is none, as in a container, it is
        `$SLURM_JOB_END_TIME`, which SLURM sets from version 23.02 on.
        """
        command = ["squeue", "--noheader", f"--jobs={self.job}", "--format=%e"]
        environment = {**os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
        try:
            answer = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=_ANSWER_SECONDS, env=environment
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return _end_in_environment()
        try:
            return datetime.fromisoformat(answer).replace(tzinfo=UTC).timestamp()
        except ValueError:  # NONE: no limit
            return None


def _end_in_environment() -> float | None:
    """The end that SLURM has set when the job began; None for one in the past, of a shell that has outlived its job."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdecimal() and float(end) > time.time() else None
