"""Starts the user's job in processes of its own, follows its steps, and kills it or one of its ranks."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from onstep.errors import OnstepError

POLL_SECONDS = 0.002

TEARDOWN_SECONDS = 60.0
"""How long torchrun may take to terminate the other ranks after one was killed."""

_STEP = re.compile(rb'"step": (\d+)')


class JobError(OnstepError):
    """The job under test failed by itself, not by a kill."""


@dataclass(frozen=True)
class UserJob:
    """`onstep train` with the user's arguments, in a separate run directory."""

    words: tuple[str, ...]
    """The arguments of `onstep train`."""
    ranks: int
    output_dir: Path
    """The run is `<output_dir>/run`."""

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.output_dir / "run"

    @property
    def log(self) -> Path:
        """The output of its processes."""
        return self.output_dir / "output.txt"

    def newest_checkpoint(self) -> int:
        """The step that the next start resumes from; 0 without a checkpoint."""
        names = (path.name.partition("-")[2] for path in (self.run / "checkpoints").glob("checkpoint-*"))
        return max((int(step) for step in names if step.isdigit()), default=0)

    def step(self) -> int:
        """The last step in the trajectory hash, which may be incomplete; 0 without one."""
        try:
            with (self.run / "certificate" / "chain.json").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                found = _STEP.findall(file.read())
        except FileNotFoundError:
            return 0
        return int(found[-1]) if found else 0

    def start(self) -> Attempt:
        """Start the job, or resume it where it was killed."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        own = [f"run.output_dir={self.output_dir}", "run.name=run", "run.fresh=false"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *launcher[: 4 * (self.ranks > 1)], "-m", "onstep", "train", *self.words, *own],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C goes to this process, which ends the job
                env=os.environ if os.getcwd() in sys.path else {**os.environ, "PYTHONSAFEPATH": "1"},  # as `onstep`
            )
        return Attempt(self, process)


class Attempt:
    """One start of a job. As a context manager, it kills remaining processes on exit, also one by SIGTERM or SIGHUP."""

    def __init__(self, job: UserJob, process: subprocess.Popen[bytes]) -> None:
        self._job = job
        self._process = process
        self._handlers: dict[int, Any] = {}

    def wait_for(self, reached: Callable[[], bool], notify: Callable[[int], None]) -> bool:
        """Wait until `reached()` (True) or until the job is done (False), reporting progress as `notify(step)`.

        Raises:
            JobError: when the job itself fails.
        """
        while not reached():
            code = self._process.poll()
            if code is not None:
                notify(self._job.step())
                if code != 0:
                    lines = self._job.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
                    last_words = "\n".join(f"  {line}" for line in lines)
                    raise JobError(
                        f"the job itself failed (exit code {code}):\n{last_words}\n"
                        f"Its full output is in {self._job.log}"
                    )
                return False
            notify(self._job.step())
            time.sleep(POLL_SECONDS)
        return True

    def kill(self, chance: random.Random) -> str | None:
        """Send SIGKILL to the job or to one of its ranks; returns which, or None if the job had already finished."""
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
        """Kill all remaining processes of the job."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGSTOP)  # keeps it from starting new processes
            for pid in [*_descendants_of(self._process.pid), self._process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Attempt:
        if threading.current_thread() is threading.main_thread():  # no other one may handle signals
            self._handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_all()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def _exit(number: int, frame: object) -> NoReturn:
    """End this process with the exit code that a shell gives to the signal."""
    raise SystemExit(128 + number)


def _descendants_of(parent: int) -> list[int]:
    below = _children_of(parent)
    for one in below:
        below += _children_of(one)
    return below


def _children_of(parent: int) -> list[int]:
    """The child processes of a process, oldest first."""
    if Path("/proc/self/task").exists():
        found: list[int] = []
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        return sorted(found)
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in listed.splitlines()]
    return sorted(int(pid) for pid, of in pairs if int(of) == parent)
