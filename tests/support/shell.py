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

    def onstep(self, *words: str, ranks: int = 1, **environment: str) -> Done:
        """Run a command to its end; the exit code is the worst of its ranks'."""
        with tempfile.TemporaryDirectory() as place:
            out, err = Path(place) / "stdout", Path(place) / "stderr"
            settings = {"words": words, "stdout": str(out), "stderr": str(err), "environment": environment}
            codes = self.processes.run("tests.support.jobs.cli_jobs", "onstep", self.directory, settings, ranks=ranks)
            return Done(max(codes), out.read_text(), err.read_text())

    def start(self, *words: str, stdout: str | Path | None = os.devnull, stderr: str | Path = os.devnull) -> Child:
        """Start a command and wait for nothing; its output goes to files. `stdout=None` closes it, as `>&-` does."""
        out = None if stdout is None else str(stdout)
        settings = {"words": words, "stdout": out, "stderr": str(stderr), "environment": {}}
        return self.processes.start("tests.support.jobs.cli_jobs", "onstep", self.directory, settings)[0]
