"""Writes the sbatch script of a launch, and submits it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from string import Template

from onstep.errors import ConfigError, OnstepError
from onstep.launch.plan import ONSTEP_COMMANDS, ClusterJob

_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}")

_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")

_SCRIPT = Template("""\
#!/bin/bash
$options

# Before the time is over the run saves, and ends with exit code 75. It asks SLURM for the time; where it cannot, SLURM
# sends it $signal, $lead seconds before the end. A rank that ends first must not end the others, which still save.
srun --kill-on-bad-exit=0 $launch
code=$$?
$requeue
exit "$$code"
""")
_REQUEUE = Template("""\
# The run continues in the next allocation; if ranks were killed (above 128), in the first $most starts of the job.
if [ "$$code" -eq 75 ] || { [ "$$code" -gt 128 ] && [ "$${SLURM_RESTART_COUNT:-0}" -lt $most ]; }; then
    scontrol requeue "$job"
    code=75  # if there is no scontrol here: this requeues the job where slurm.conf has RequeueExit=75
fi""")
_NO_REQUEUE = "# 75: submit this script again, and the run continues"
_KILLABLE_STARTS = 20
"""In how many starts of a job killed ranks requeue it, whatever ended the others: they may be killed each time."""
_ARRAY_TASK = "$SLURM_ARRAY_TASK_ID"
SIGNAL = "USR2"
"""What SLURM sends before the end: nothing else uses it (NCCL uses SIGUSR1)."""


@dataclass(frozen=True)
class SlurmJob(ClusterJob):
    """What an sbatch script asks for and runs."""

    time: str | None = None
    partition: str | None = None
    requeue: bool = False
    lead_seconds: int = 120
    """How long before the end of the allocation the ranks are asked to save."""
    array: str | None = None
    """The tasks of an array, such as `0-3`: runs of their own, whose names end with their numbers."""
    options: Sequence[str] = ()
    """Further options of sbatch."""

    @property
    def label(self) -> str:
        """The name in `squeue` and in the names of output files: a blank would end an option of the script."""
        return re.sub(r"[^\w.-]", "_", self.name, flags=re.ASCII)

    @property
    def output_number(self) -> str:
        """What `sbatch` makes the number in the name of an output file of."""
        return "%j" if self.array is None else "%A_%a"

    @property
    def id(self) -> str:
        """The id of the job in its script: the last task of an array has the id of the array."""
        return "$SLURM_JOB_ID" if self.array is None else f"${{SLURM_ARRAY_JOB_ID}}_{_ARRAY_TASK}"

    def check(self) -> None:
        """Refuse values that sbatch would not understand.

        Raises:
            ConfigError: naming the option.
        """
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time must be MINUTES, HH:MM:SS or DAYS-HH:MM:SS, got {self.time!r}.")
        if self.array is not None and not _ARRAY.fullmatch(self.array):
            raise ConfigError(f"--array must be numbers and ranges, such as 0-3 or 0-31%4, got {self.array!r}.")
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise ConfigError(
                    f"--sbatch must be one option of sbatch, such as --sbatch=--account=lab, got {option!r}."
                )


def script(job: SlurmJob) -> str:
    """The sbatch script of a job."""
    options = {
        "job-name": job.label,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "time": job.time,
        "partition": job.partition,
        "array": job.array,
        "output": f"%x-{job.output_number}.out",
        "open-mode": "append",
        "signal": f"{SIGNAL}@{job.lead_seconds}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue"]
    lines += [f"#SBATCH {option}" for option in job.options]
    return _SCRIPT.substitute(
        options="\n".join(lines),
        lead=job.lead_seconds,
        signal=f"SIG{SIGNAL}",
        launch=_launch_line(job),
        requeue=_REQUEUE.substitute(most=_KILLABLE_STARTS, job=job.id) if job.requeue else _NO_REQUEUE,
    )


def _launch_line(job: SlurmJob) -> str:
    """`onstep launch ...`, which runs once on each node; the batch script runs on the first of them."""
    ranks = job.ranks_per_node or job.gpus_per_node
    options = [f"--nproc={ranks}"] if ranks else []
    if job.nodes > 1:
        options += [f"--nnodes={job.nodes}", '--rdzv="$(hostname):$((20000 + SLURM_JOB_ID % 10000))"']
        options += ['--rdzv-id="$SLURM_JOB_ID"']
    options += [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    words = " ".join(map(_quoted, job.words if job.array is None else _named_by_task(job)))
    return " \\\n    ".join(["onstep launch", *options, f"-- {words}"])


def _named_by_task(job: SlurmJob) -> list[str]:
    """The words, with a name of the run for each task of an array."""
    names = [word for word in job.words if word.startswith("run.name=")]
    if job.words[0] not in ONSTEP_COMMANDS or any(_ARRAY_TASK in name for name in names):
        return list(job.words)
    others = [word for word in job.words if word not in names]
    return [*others, f"{names[-1] if names else f'run.name={job.name}'}-{_ARRAY_TASK}"]


def _quoted(word: str) -> str:
    """A word for the shell, which only fills in the number of the array's task."""
    parts = word.split(_ARRAY_TASK)
    return f'"{_ARRAY_TASK}"'.join(shlex.quote(part) if part or len(parts) == 1 else "" for part in parts)


def submit(text: str) -> str:
    """Submit a script; the id of the job.

    Raises:
        ConfigError: without sbatch.
        OnstepError: if SLURM refuses the job, with its reason.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--slurm requires sbatch, which is not on the path; run this on a login node of the cluster, or write the "
            "script with --print and submit it there."
        )
    result = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        reason = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        raise OnstepError(f"sbatch refused the job: {reason}; look at the script with --print.")
    return result.stdout.strip().partition(";")[0]
