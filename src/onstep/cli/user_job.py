"""A user's own job as child processes that can be watched from outside and killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onstep.errors import OnstepError

POLL_SECONDS = 0.002
TEARDOWN_SECONDS = 60.0
"""How long torchrun may take to end the other ranks after one was killed."""
_STEP = re.compile(rb'"step": (\d+)')


class JobError(OnstepError):
    """The job ended with an error of its own."""


@dataclass(frozen=True)
class UserJob:
    """`onstep train` with the user's words, in a run folder of its own."""

    words: tuple[str, ...]
    """Everything after `onstep train`."""
    ranks: int
    output_dir: Path
    """The run is `<output_dir>/run`."""

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.output_dir / "run"

    @property
    def log(self) -> Path:
        """What its processes print."""
        return self.output_dir / "output.txt"

    def newest_checkpoint(self) -> int:
        """The step that the next start continues from; 0 without a checkpoint."""
        names = (path.name.partition("-")[2] for path in (self.run / "checkpoints").glob("checkpoint-*"))
        return max((int(step) for step in names if step.isdigit()), default=0)

    def step(self) -> int:
        """The last step in the certificate of rank 0, also while it is written; 0 without one."""
        try:
            with (self.run / "certificate" / "rank_0.json").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                found = _STEP.findall(file.read())
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0

    def start(self) -> Attempt:
        """Start it, or continue it where it was killed."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        own = [f"run.output_dir={self.output_dir}", "run.name=run", "run.fresh=false"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *launcher[: 4 * (self.ranks > 1)], "-m", "onstep", "train", *self.words, *own],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for us; we end the job
            )
        return Attempt(self, process)


class Attempt:
    """One start of a job. As a context manager it leaves no process behind."""

    def __init__(self, job: UserJob, process: subprocess.Popen[bytes]) -> None:
        self._job = job
        self._process = process

    def wait_for(self, reached: Callable[[], bool], tell: Callable[[int], None]) -> bool:
        """Wait until something holds (True) or the job is done (False); `tell` is told the step meanwhile.

        Raises:
            JobError: when the job fails by itself.
        """
        while not reached():
            code = self._process.poll()
            if code is not None:
                tell(self._job.step())
                if code != 0:
                    raise JobError(f"the job failed by itself, with exit code {code}:\n{self._last_words()}")
                return False
            tell(self._job.step())
            time.sleep(POLL_SECONDS)
        return True

    def kill(self, chance: random.Random) -> str | None:
        """SIGKILL for the job, or for one of its ranks; returns for whom, None if the job was done before."""
        members = _children_of(self._process.pid) if self._job.ranks > 1 else []
        victim = chance.randrange(self._job.ranks)
        is_alone = chance.random() < 0.5 and len(members) == self._job.ranks
        if is_alone:
            with suppress(ProcessLookupError):
                os.kill(members[victim], signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TEARDOWN_SECONDS)
        self.kill_all()
        if self._process.returncode == 0:
            return None
        return f"rank {victim}" if is_alone else "all"

    def kill_all(self) -> None:
        """End whatever of the job still lives."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGSTOP)  # it starts nothing new
            for pid in [*_descendants_of(self._process.pid), self._process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_all()

    def _last_words(self) -> str:
        lines = self._job.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-15:]) + f"\nAll it printed is in {self._job.log}"


def _descendants_of(parent: int) -> list[int]:
    below = _children_of(parent)
    for one in below:
        below += _children_of(one)
    return below


def _children_of(parent: int) -> list[int]:
    """The processes that a process has started, by age."""
    if Path("/proc/self/task").exists():
        found: list[int] = []
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return sorted(found)
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in listed.splitlines()]
    return sorted(int(pid) for pid, of in pairs if int(of) == parent)
