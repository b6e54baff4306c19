"""`onstep` as a user's shell runs it: a process of its own in a directory, without the seconds of its imports."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked_processes import Child, Processes


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Shell:
    """Runs `onstep` in a directory."""

    processes: Processes
    directory: Path
    small: tuple[str, ...] = ()
    """Words that make a training small."""

    def onstep(self, *words: str, **environment: str) -> Done:
        with tempfile.TemporaryDirectory() as place:
            out, err = Path(place) / "stdout", Path(place) / "stderr"
            settings = {"words": words, "stdout": str(out), "stderr": str(err), "environment": environment}
            [code] = self.processes.run("tests.support.jobs.cli_jobs", "onstep", self.directory, settings)
            return Done(code, out.read_text(), err.read_text())

    def start(self, *words: str) -> Child:
        """Start a command and wait for nothing; what it prints is lost."""
        settings = {"words": words, "stdout": os.devnull, "stderr": os.devnull, "environment": {}}
        return self.processes.start("tests.support.jobs.cli_jobs", "onstep", self.directory, settings)[0]
